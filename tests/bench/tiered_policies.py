"""Simulate memory below the caches, and replicas that read from each other: hits and times to first token.

As in `tests.bench.policies`, with its traces and loads, and the policy `cost`; one run with unchanged arrivals.
"""

from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from lab.simulation.comparison import Outcome
from lab.simulation.report import duration
from lab.simulation.settings import Settings
from tests.bench.policies import Case, load_of, name_of, outcome, traces

REPLICAS = 8
HOST_TOKENS = 2_000_000
TIERS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "host memory": {"host_tokens": HOST_TOKENS},
    "host memory and a disk of 10 M": {"host_tokens": HOST_TOKENS, "disk_tokens": 10_000_000},
    "reading at 160,000": {"pull_tokens_per_s": 160_000.0},
    "host memory, reading at 40,000": {"host_tokens": HOST_TOKENS, "pull_tokens_per_s": 40_000.0},
    "**host memory, reading at 160,000**": {"host_tokens": HOST_TOKENS, "pull_tokens_per_s": 160_000.0},
}
ENGINE_LOAD = 0.8
ENGINE_REQUESTS = 1000
ENGINE_TIERS = ("nothing", "host memory", "**host memory, reading at 160,000**")


def run(rounds: int) -> None:
    del rounds  # nothing is measured but virtual time
    with ProcessPoolExecutor() as processes:
        print(f"\n{REPLICAS} replicas of {Settings().capacity_tokens:,} tokens, host memory of {HOST_TOKENS:,} each:\n")
        sources = traces()
        _table(processes, [(source, name, _case(source, TIERS[name])) for source in sources for name in TIERS])
        print(f"\nThe engine's own scheduler, load {ENGINE_LOAD}, {ENGINE_REQUESTS:,} requests:\n")
        engine = {"model": "engine"}
        _table(
            processes,
            [
                (source, name, _case(source, TIERS[name] | engine, ENGINE_LOAD, ENGINE_REQUESTS))
                for source in sources
                for name in ENGINE_TIERS
            ],
        )


def _case(source: str, more: dict[str, Any], load: float | None = None, requests: int | None = None) -> Case:
    settings = Settings(replicas=REPLICAS, **more)
    return Case(source, "cost", settings, load or load_of(source), runs=1, jitter_s=0.0, requests=requests)


def _table(processes: ProcessPoolExecutor, cases: Iterable[tuple[str, str, Case]]) -> None:
    cases = list(cases)
    print("| trace | beside the caches | hits | loaded | mean TTFT | p50 | p90 | p99 |\n| --- |" + " --- |" * 7)
    for (source, name, _), one in zip(cases, processes.map(outcome, (case for *_, case in cases)), strict=True):
        print(f"| {name_of(source)} | {name} | {_cells(one)} |", flush=True)


def _cells(one: Outcome) -> str:
    times = (one.ttft_mean_s, one.ttft_p50_s, one.ttft_p90_s, one.ttft_p99_s)
    return " | ".join([f"{one.hit_rate:.1%}", f"{one.brought_rate:.1%}", *map(duration, times)])
