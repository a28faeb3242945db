"""CPU time and memory of a piece of work, printed as rows of a Markdown table."""

import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

OURS = [Path(__file__).resolve().parent.parent.parent / name for name in ("api", "engines", "events", "router")]


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


@contextmanager
def calls() -> Iterator[list[str]]:
    """Collect the file of each Python call that is made meanwhile."""
    made: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        del argument
        if event == "call":
            made.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        yield made
    finally:
        sys.setprofile(None)


def rows_of_calls(name: str, made: list[str]) -> None:
    ours = [file for file in made if any(map(Path(file).is_relative_to, OURS))]
    row(f"{name}: Python calls, all", [len(made)], "calls")
    row(f"{name}: our files among them", [len({*ours})], "files")
