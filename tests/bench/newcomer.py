"""Measure how long a newcomer waits: for each command's help, and from `warmroute up` to a first warm answer."""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence

from fleet.cli import COMMANDS
from tests.bench.measure import heading, row
from tests.fleet.test_up import starting

UP = {
    "simulated, plain processes": ("--simulated", "--no-ray"),
    "computed, plain processes": ("--no-ray",),
    "computed, on Ray (the default)": (),
}
TARGET_S, HELP_TARGET_MS = 15, 300


def run(rounds: int) -> None:
    heading("`--help` of each command, CPU")
    for name in sorted(COMMANDS):
        times = [cpu_ms((sys.executable, "-m", "fleet", name, "--help")) for _ in range(rounds)]
        row(f"`warmroute {name}`", times, "ms", f"<= {HELP_TARGET_MS} ms" if name == "up" else "")
    print()
    heading("from the start to the second answer of `warmroute up`, which finds the first in the cache")
    for name, options in UP.items():
        times = [first_warm_s(options) for _ in range(rounds)]
        row(name, times, "s", f"<= {TARGET_S} s")


def cpu_ms(command: Sequence[str]) -> float:
    def spent_s() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before_s = spent_s()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"COLUMNS": "80"})
    return 1000 * (spent_s() - before_s)


def first_warm_s(options: Sequence[str]) -> float:
    began_s = time.monotonic()
    with starting(*options, "--port", "0") as running:
        running.wait_for("Ctrl-C ends everything")
        cached = [running.ask()[1]["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)]
        took_s = time.monotonic() - began_s
        assert cached[0] == 0 < cached[1], f"cached tokens of both answers: {cached}"
        running.end()
    return took_s
