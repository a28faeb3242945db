"""What policies make of traffic, simulated: hits and times to first token, beside bounds, delays and wrong reports.

The traces are made by chance (tests/lab/traffic.py). Loads are of raw prompts, cached or not; 1 is what replicas that
have no cache could just do.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import router.effects
from lab.simulation.comparison import Row, compared
from lab.simulation.report import duration
from lab.simulation.settings import DEFAULT_CAPACITY_TOKENS, Settings
from lab.trace.requests import Trace
from lab.trace.shaping import at_rate, coarsened
from tests.lab.traffic import agents, conversations, unshared

REQUESTS = 4000
ENGINE_REQUESTS = 2000
RUNS = 2
JITTER_S = 0.3
LARGE_CAPACITY_TOKENS = 2_000_000
LOADS = {"conversations": 0.9, "agents": 3.0, "unshared": 0.9}
PATIENCES = (0.0, 1.0, 2.0, 4.0, 8.0)
CAUTIONS: dict[str, dict[str, Any]] = {
    "events at once": {},
    "events 1 s late": {"event_delay_s": 1.0},
    "events 5 s late": {"event_delay_s": 5.0},
    "1 % of batches lost, and repaired at the next": {"event_loss": 0.01},
    "no events": {"events": False},
    "half the replicas say 1.5 times their rate, half 0.5 times": {"rate_error": 0.5},
    "two routers": {"routers": 2},
    "two routers, events 1 s late": {"routers": 2, "event_delay_s": 1.0},
}


class Case(NamedTuple):
    trace: Trace
    settings: Settings

    def rows(self, policies: Iterable[str], *, bounds: bool = True, seeds: int = RUNS) -> list[Row]:
        load = LOADS[self.trace.name]
        paced = at_rate(self.trace, load * self.settings.replicas * self.settings.prefill_tokens_per_s)
        return compared(paced, self.settings, list(policies), seeds=seeds, jitter_s=JITTER_S, bounds=bounds)


@contextmanager
def patience(factor: float) -> Iterator[None]:
    """The default policy with another order of computing; 0: in order of arrival."""
    usual, router.effects.PATIENCE = router.effects.PATIENCE, factor
    try:
        yield
    finally:
        router.effects.PATIENCE = usual


def run(rounds: int) -> None:
    del rounds  # the seeds are fixed
    traces = [conversations(REQUESTS), coarsened(agents(REQUESTS), 16), unshared(REQUESTS)]
    print(f"\nSimulated: {REQUESTS:,} requests a trace, mean of {RUNS} runs with {JITTER_S} s of jitter.\n")
    for trace in traces:
        _grid(trace)
    print("\nThe engine's own scheduler, chunks and batches, 8 replicas:\n")
    _head("traffic")
    for trace in traces[:2]:
        _policies(trace.name, Case(_short(trace), Settings(replicas=8, model="engine")))
    print("\n`cost` with other orders of computing, 8 replicas:\n")
    _head("traffic")
    for trace in traces[:2]:
        _patience(trace, "fifo")
        _patience(trace, "engine")
    print("\nWhat the router is told late, wrongly or not at all, 8 replicas, `cost`:\n")
    _head("traffic")
    for trace in traces[:2]:
        for name, changes in CAUTIONS.items():
            row = Case(trace, Settings(replicas=8, **changes)).rows(["cost"], bounds=False)[0]
            _line(trace.name, name, row)


def _patience(trace: Trace, model: Literal["fifo", "engine"]) -> None:
    case = Case(_short(trace), Settings(replicas=8, model=model))
    for factor in PATIENCES:
        with patience(factor):
            _line(f"{trace.name}, {model}", f"patience {factor:g}", case.rows(["cost"], bounds=False)[0])


def _short(trace: Trace) -> Trace:
    return Trace(trace.name, trace.block_tokens, trace.requests[:ENGINE_REQUESTS])


def _grid(trace: Trace) -> None:
    print(f"\n{trace.name}, raw load {LOADS[trace.name]}: hits, mean and 99th percentile of TTFT\n")
    names = ("least-loaded", "prefix", "cost, in order of arrival", "**cost**", "pooled", "ideal")
    print(f"| replicas, cache of each | {' | '.join(names)} |\n| {'--- | ' * (len(names) + 1)}")
    for replicas in (4, 8, 16):
        for capacity in (DEFAULT_CAPACITY_TOKENS, LARGE_CAPACITY_TOKENS):
            case = Case(trace, Settings(replicas=replicas, capacity_tokens=capacity))
            rows = {row.name: row for row in case.rows(["least-loaded", "prefix", "cost"])}
            with patience(0.0):
                plain = case.rows(["cost"], bounds=False)[0]
            shown = (rows["least-loaded"], rows["prefix"], plain, rows["cost"], rows["pooled"], rows["ideal"])
            print(f"| {replicas}, {capacity:,} | {' | '.join(map(_cell, shown))} |", flush=True)


def _cell(row: Row) -> str:
    mean = row.mean
    return f"{mean.hit_rate:.1%}, {duration(mean.ttft_mean_s)}, {duration(mean.ttft_p99_s)}"


def _policies(name: str, case: Case) -> None:
    rows = case.rows(["round-robin", "least-loaded", "prefix", "cost"], bounds=False)
    with patience(0.0):
        plain = case.rows(["cost"], bounds=False)[0]
    for row in rows:
        if row.name == "cost":
            _line(name, "cost, in order of arrival", plain)
        _line(name, "**cost**" if row.name == "cost" else row.name, row)


def _head(first: str) -> None:
    print(f"| {first} | policy | hits | mean TTFT | p50 | p90 | p99 |\n| --- | --- | --- | --- | --- | --- | --- |")


def _line(first: str, name: str, row: Row) -> None:
    mean = row.mean
    times = (mean.ttft_mean_s, mean.ttft_p50_s, mean.ttft_p90_s, mean.ttft_p99_s)
    print(f"| {first} | {name} | {mean.hit_rate:.1%} | {' | '.join(map(duration, times))} |", flush=True)
