"""Measure the CPU of a router that only follows its replicas. Linux only: it reads /proc."""

import time

from tests.bench.measure import heading, row
from tests.chaos.replicas import cpu_s
from tests.chaos.routers import fleet, router

SETTLED_S = 3.0
WATCHED_S = 10.0


def run(rounds: int) -> None:
    heading("CPU of a router without requests, % of a core")
    for count in (4, 16):
        with fleet(count) as replicas, router(*replicas.as_options, "--log-level", "error") as running:
            time.sleep(SETTLED_S)
            figures = []
            for _ in range(rounds):
                before_s, began_s = cpu_s(running.process.pid), time.monotonic()
                time.sleep(WATCHED_S)
                figures.append((cpu_s(running.process.pid) - before_s) / (time.monotonic() - began_s) * 100)
        row(f"{count} native replicas", figures, "%")
    print()
