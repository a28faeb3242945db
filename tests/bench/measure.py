"""CPU time and memory of a piece of work, printed as rows of a Markdown table."""

import gc
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path


def cpu_us(prepare: Callable[[], Callable[[], object]], units: int, rounds: int) -> list[float]:
    """CPU microseconds per unit, round by round, of the callable that `prepare` returns."""
    figures = []
    for _ in range(rounds):
        work = prepare()
        gc.collect()
        began = time.process_time_ns()
        work()
        figures.append((time.process_time_ns() - began) / 1000 / units)
    return figures


def row(name: str, figures: list[float], unit: str, target: str = "") -> None:
    middle = statistics.median(figures)
    print(f"| {name} | **{middle:.3g}** {unit} ({min(figures):.3g} to {max(figures):.3g}) | {target} |", flush=True)


def heading(title: str) -> None:
    print(f"| {title} | measured | target |\n| --- | --- | --- |")


def resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
