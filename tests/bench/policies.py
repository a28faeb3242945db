"""Simulate policies on traffic: hits and times to first token, beside bounds, delays and wrong reports.

WARMROUTE_TRACES names a folder with *.jsonl or *.jsonl.gz of Mooncake's kind; without it the traces are generated
(tests/lab/traffic.py). Loads count raw prompts, cached or not; 1 is the capacity of replicas without caches.
Blocks of 64 tokens are taken by 16 where prompts are long. It takes most of an hour.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import router.placement.effects
from lab.simulation.comparison import Outcome, compared, duration
from lab.simulation.settings import DEFAULT_CAPACITY_TOKENS, Settings
from lab.trace.formats import read_trace
from lab.trace.requests import Trace, at_rate, coarsened
from tests.lab.traffic import agents, conversations, unshared

FOLDER = "WARMROUTE_TRACES"
RUNS = 2
JITTER_S = 0.3
LOAD = 0.9
LOADS = {"hotprefix_semisynth_a": 1.2, "agents": 3.0}
REQUESTS = 4000  # of generated traces
MADE: dict[str, Callable[[int], Trace]] = {"conversations": conversations, "agents": agents, "unshared": unshared}
LONG_TOKENS = 16_384  # mean of a trace whose small blocks are taken together
SMALL_BLOCK, COARSER = 64, 16
CAPACITIES = (DEFAULT_CAPACITY_TOKENS, 2_000_000)
KNOWN = {  # settings under which others have published figures: nothing but arrivals as they are, once
    "round-robin": {},
    "least-loaded": {},
    "prefix, by events alone": {"optimistic": False},
    "cost": {},
}
EFFECTS: dict[str, dict[str, float]] = {
    "neither": {"PATIENCE": 0.0, "LOSS_WEIGHT": 0.0},
    "the order alone": {"LOSS_WEIGHT": 0.0},
    "the price alone": {"PATIENCE": 0.0},
    "**both**": {},
    "both, patience 1": {"PATIENCE": 1.0},
    "both, patience 4": {"PATIENCE": 4.0},
    "both, a loss counts half": {"LOSS_WEIGHT": 1.0},
    "both, a loss counts twice": {"LOSS_WEIGHT": 4.0},
}


class Case(NamedTuple):
    trace: str  # a file, or one of MADE
    policy: str  # or "pooled"
    settings: Settings
    load: float
    constants: Mapping[str, float] = {}  # of router.placement.effects
    runs: int = RUNS
    jitter_s: float = JITTER_S


def run(rounds: int) -> None:
    del rounds  # the seeds are fixed
    sources = traces()
    with ProcessPoolExecutor() as processes:
        _known(processes, sources)
        for source in sources:
            _grid(processes, source)
        print(f"\nOrder and price, {_fleet(8)}:\n")
        _table(
            processes,
            "trace",
            {
                (name_of(source), name): Case(source, "cost", _settings(8), load_of(source), constants)
                for source in sources
                for name, constants in EFFECTS.items()
            },
        )


def traces() -> list[str]:
    folder = os.environ.get(FOLDER)
    if not folder:
        return list(MADE)
    files = sorted(map(str, Path(folder).glob("*.jsonl*")))
    if not files:
        raise SystemExit(
            f"{FOLDER}: {folder!r} has no *.jsonl or *.jsonl.gz; name a folder with Mooncake's kind of traces"
        )
    return files


def name_of(trace: str) -> str:
    return Path(trace).name.removesuffix(".gz").removesuffix(".jsonl")


def load_of(trace: str) -> float:
    return LOADS.get(name_of(trace), LOAD)


def _fleet(replicas: int) -> str:
    return f"{replicas} replicas of {DEFAULT_CAPACITY_TOKENS:,} tokens"


def _settings(replicas: int, **more: Any) -> Settings:
    return Settings(replicas=replicas, **more)


# ---- tables


def _known(processes: ProcessPoolExecutor, sources: Sequence[str]) -> None:
    print(f"\nOne run, unchanged arrivals, load {LOAD}, {_fleet(8)}:\n")
    cases = {}
    for source in sources:
        for name, more in KNOWN.items():
            policy = name.partition(",")[0]
            cases[name_of(source), name] = Case(source, policy, _settings(8, **more), LOAD, runs=1, jitter_s=0.0)
        cases[name_of(source), "pooled"] = Case(source, "pooled", _settings(8), LOAD, runs=1, jitter_s=0.0)
    _table(processes, "trace", cases)


def _grid(processes: ProcessPoolExecutor, source: str) -> None:
    policies = ("least-loaded", "cost", "pooled")
    print(f"\n{name_of(source)}, load {load_of(source)}: hits, mean and 99th percentile of TTFT\n")
    print(f"| replicas, cache of each | least-loaded | **cost** | pooled |\n| {'--- | ' * 4}")
    fleets = [(replicas, tokens) for replicas in (4, 8, 16) for tokens in CAPACITIES]
    cells = [
        Case(source, policy, Settings(replicas=replicas, capacity_tokens=tokens), load_of(source))
        for replicas, tokens in fleets
        for policy in policies
    ]
    outcomes = processes.map(outcome, cells)
    for replicas, tokens in fleets:
        row = [_cell(next(outcomes)) for _ in policies]
        print(f"| {replicas}, {tokens:,} | {' | '.join(row)} |", flush=True)


def _cell(one: Outcome) -> str:
    return f"{one.hit_rate:.1%}, {duration(one.ttft_mean_s)}, {duration(one.ttft_p99_s)}"


def _table(processes: ProcessPoolExecutor, first: str, cases: Mapping[tuple[str, str], Case]) -> None:
    print(f"| {first} | policy | hits | mean TTFT | p50 | p90 | p99 |\n| --- | --- | --- | --- | --- | --- | --- |")
    for (trace, name), one in zip(cases, processes.map(outcome, cases.values()), strict=True):
        times = (one.ttft_mean_s, one.ttft_p50_s, one.ttft_p90_s, one.ttft_p99_s)
        print(f"| {trace} | {name} | {one.hit_rate:.1%} | {' | '.join(map(duration, times))} |", flush=True)


# ---- in a process of its own


def outcome(case: Case) -> Outcome:
    trace = trace_of(case.trace)
    paced = at_rate(trace, case.load * case.settings.replicas * case.settings.prefill_tokens_per_s)
    is_bound = case.policy == "pooled"
    policies = [] if is_bound else [case.policy]
    with patch.dict(vars(router.placement.effects), case.constants):
        rows = compared(paced, case.settings, policies, seeds=case.runs, jitter_s=case.jitter_s, bounds=is_bound)
    return rows[0].mean


@cache
def trace_of(named: str) -> Trace:
    trace = MADE[named](REQUESTS) if named in MADE else read_trace(Path(named))
    is_long = trace.input_tokens > LONG_TOKENS * len(trace.requests)
    return coarsened(trace, COARSER) if is_long and trace.block_tokens <= SMALL_BLOCK else trace
