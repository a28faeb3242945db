"""The result of a measurement as written to a file, with the machine."""

import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct

from lab.bench.figures import Figures, Ratio
from lab.bench.load import LAG_SHARE, Overhead
from lab.bench.probe import Probe

FORMAT = "warmroute-bench/1"
LATE_LIMIT_S = 0.02


class Machine(Struct, frozen=True):
    system: str
    cpu: str
    cpus: int
    python: str


class EndpointResult(Struct, frozen=True):
    url: str
    probe: Probe
    figures: Figures  # of all rounds
    rounds: list[Figures]
    own: list[Overhead]  # what the load generator took, round by round
    unfinished: int
    idle: dict[str, str | None] = {}  # a router's replicas that have answered nothing, and why


class Result(Struct, frozen=True):
    """Rules for editing: new fields go last with a default, nothing is renamed."""

    format: str
    version: str
    machine: Machine
    began: str  # in UTC
    settings: dict[str, Any]
    interrupted: bool
    endpoints: list[EndpointResult]
    comparison: list[Ratio]  # the second endpoint / the first
    warnings: list[str]


def machine() -> Machine:
    python = f"{platform.python_implementation()} {platform.python_version()}"
    cpus = Path("/proc/cpuinfo").read_text(errors="replace").splitlines() if sys.platform == "linux" else ()
    names = (line.partition(":")[2].strip() for line in cpus if line.startswith("model name"))
    cpu = next(names, platform.processor() or platform.machine())
    return Machine(platform.platform(), cpu, os.cpu_count() or 0, python)


def warnings(endpoint: EndpointResult) -> Iterator[str]:
    figures, probe = endpoint.figures, endpoint.probe
    latencies = {"first tokens": figures.ttft_s.p99, "tokens after the first": figures.itl_s.p99}
    late = [name for name, p99_s in latencies.items() if any(own.delays(p99_s) for own in endpoint.own)]
    if late:
        lag_s = max(own.lag_p99_s for own in endpoint.own)
        yield (
            f"the load generator itself was late by {lag_s * 1000:.1f} ms at p99, more than {LAG_SHARE:.0%} of the "
            f"p99 of {' and of '.join(late)}; give it a core of its own, or ask for less at once"
        )
    if any(own.is_busy for own in endpoint.own):
        share = max(own.cpu_share for own in endpoint.own)
        yield f"the load generator used {share:.0%} of its core, and may be what limits the rate; ask for less at once"
    late_s = figures.sent_late_s.p99
    if late_s is not None and late_s > LATE_LIMIT_S:
        yield f"requests were sent late, by {late_s * 1000:.0f} ms at p99: it could not keep the rate"
    if not probe.is_measured:
        yield "it does not tell the length of prompts; a word was taken for a token"
    if not probe.ignores_eos:
        yield "it refuses ignore_eos, so answers may be shorter than was asked for"
