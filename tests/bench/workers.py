"""Measure a router with several workers beside one with one worker: CPU per request, requests per second, memory.

A worker of several tells the others what it sends, and hears what they send. On a machine with fewer free cores than
workers, clients and replicas need, what counts is the CPU per request: `workers' capacity` is how many requests the
workers answer in the time in which one alone answers one, if each has a core to itself.
"""

import random
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import uvloop

from tests.bench.measure import heading, row
from tests.bench.router import APPROXIMATE, MEGABYTE, PLAIN, SMALL, ask_all, options, source_words, workers
from tests.chaos.replicas import cpu_s
from tests.chaos.routers import RouterProcess, router
from tests.processes import children

COUNTS = 1, 2, 4
CLIENTS = 32
REQUESTS = 4000


class Figures(NamedTuple):
    cpu_ms: float  # per 1,000 requests
    per_s: float


def run(rounds: int) -> None:
    with ExitStack() as stack:
        ports = stack.enter_context(workers())
        routers = {
            count: stack.enter_context(router("--workers", count, *options(APPROXIMATE, ports, Path())))
            for count in COUNTS
        }
        for running in routers.values():
            one_round(running, "warms up")
        measured: dict[int, list[Figures]] = {count: [] for count in COUNTS}
        for number in range(rounds):
            for count in COUNTS if number % 2 else reversed(COUNTS):
                measured[count].append(one_round(routers[count], str(number)))
        show(measured)
        heading("memory, each page that processes share divided among them")
        for count, running in routers.items():
            row(f"{count} workers", [memory_bytes(running) / MEGABYTE], "MB")


def show(measured: dict[int, list[Figures]]) -> None:
    heading(f"{SMALL.name}, {CLIENTS} connections")
    for count, figures in measured.items():
        row(f"{count} workers: CPU per 1,000 requests", [one.cpu_ms for one in figures], "ms")
    for count, figures in measured.items():
        row(f"{count} workers: requests here", [one.per_s for one in figures], "/s")
    alone = [one.cpu_ms for one in measured[1]]
    for count in COUNTS[1:]:
        pairs = zip(alone, measured[count], strict=True)
        row(f"{count} workers' capacity", [count * one_ms / several.cpu_ms for one_ms, several in pairs], "times one's")
    print()


def one_round(running: RouterProcess, seed: str) -> Figures:
    bodies = SMALL.bodies(source_words(), random.Random(seed), REQUESTS)
    before_s, began_s = all_cpu_s(running), time.perf_counter()
    durations_s: list[float] = []
    uvloop.run(ask_all(running.port, iter(bodies), PLAIN, CLIENTS, durations_s))
    took_s = time.perf_counter() - began_s
    assert len(durations_s) == len(bodies), (len(durations_s), len(bodies))
    return Figures((all_cpu_s(running) - before_s) * 1e6 / len(bodies), len(bodies) / took_s)


def processes(running: RouterProcess) -> list[int]:
    pid = running.process.pid
    return [pid, *children(pid)]


def all_cpu_s(running: RouterProcess) -> float:
    return sum(map(cpu_s, processes(running)))


def memory_bytes(running: RouterProcess) -> int:
    rollups = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in processes(running)]
    return sum(int(text.split("Pss:")[1].split()[0]) * 1024 for text in rollups)
