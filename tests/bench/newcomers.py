"""Simulate ties that go to the emptiest cache: with all replicas from the start, and with one added.

WARMROUTE_TRACES names a folder of traces, as for `policies`. At light load nobody waits, so the prefix alone decides;
at full load the queues do. A replica that is added takes requests from the middle of the trace on, and those of the
next quarter of it are counted. It takes ten minutes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from statistics import fmean
from typing import NamedTuple, TypeAlias
from unittest.mock import patch

from msgspec.structs import replace

from lab.percentiles import percentile
from lab.simulation.fleet import SimulatedFleet
from lab.simulation.job import Job, jobs_of
from lab.simulation.report import duration
from lab.simulation.settings import Settings
from lab.trace.requests import at_rate, jittered
from router.placement.cost import INFINITE, Candidate
from router.placement.decision import Decision
from router.placement.policy import POLICIES, Draws, Ring
from tests.bench.policies import JITTER_S, load_of, name_of, trace_of, traces

REPLICAS = 8
RUNS = 2
REQUESTS = 6000  # of each trace
SETTINGS = Settings(replicas=REPLICAS)
LIGHT = 0.25  # of the full load
COUNTED = 0.25  # of the trace, after a replica was added
NEWEST = REPLICAS - 1
NOT_STARTED = "not started yet"


Room: TypeAlias = Callable[[Candidate, int], float]  # for a prompt of so many tokens; most wins


def emptiest(candidate: Candidate, tokens: int) -> float:
    del tokens
    return candidate.empty_tokens or 0.0


def evicts_nothing(candidate: Candidate, tokens: int) -> float:
    empty = candidate.empty_tokens or 0.0
    return empty if empty >= tokens else 0.0


def least_given(candidate: Candidate, tokens: int) -> float:
    del tokens
    return -candidate.assigned_tokens


class Margin(NamedTuple):
    """Replicas whose time to first token is within this of the cheapest one's are near enough."""

    share: float = 0.0
    s: float = 0.0
    room: Room | None = None  # decides among those; None: the shipped policy alone decides
    waits: bool = True  # also where prompts wait


MARGINS = {
    "shipped": Margin(),
    "within 1 %, emptiest": Margin(0.01, room=emptiest),
    "within 5 %, least given": Margin(0.05, room=least_given),
    "within 5 %, evicts nothing": Margin(0.05, room=evicts_nothing),
    "within 5 %, evicts nothing, nothing waits": Margin(0.05, room=evicts_nothing, waits=False),
    "within 150 ms, evicts nothing": Margin(s=0.15, room=evicts_nothing),
}


class Case(NamedTuple):
    trace: str
    load: float
    is_added: bool  # the newest replica, in the middle
    ties: str  # of MARGINS
    seed: int


class Figures(NamedTuple):
    ttft_mean_s: float
    ttft_p99_s: float
    hit_rate: float
    requests: tuple[float, ...]  # each replica's share
    hits: tuple[float, ...]  # likewise, of the prompt tokens that were found in caches


def run(rounds: int) -> None:
    del rounds  # the seeds are fixed
    sources = traces()
    with ProcessPoolExecutor() as processes:
        for is_added, is_light in product((True, False), repeat=2):
            grid = [(source, name) for source in sources for name in MARGINS]
            cases = [
                Case(source, load_of(source) * (LIGHT if is_light else 1.0), is_added, name, seed)
                for source, name in grid
                for seed in range(RUNS)
            ]
            found = processes.map(figures, cases)
            _tables(is_added, is_light, {cell: [next(found) for _ in range(RUNS)] for cell in grid})


def _tables(is_added: bool, is_light: bool, found: Mapping[tuple[str, str], Sequence[Figures]]) -> None:
    fleet = f"{NEWEST} replicas, and one more from the middle on" if is_added else f"{REPLICAS} replicas"
    print(f"\n{fleet}, {'light' if is_light else 'full'} load: hits, mean TTFT and p99, means of {RUNS} runs\n")
    _table(found, _times)
    print(f"\n{'The share of the new one' if is_added else 'The smallest and the largest share'}: requests; hits\n")
    _table(found, _shares_of_new if is_added else _shares)


def _table(found: Mapping[tuple[str, str], Sequence[Figures]], cell: Callable[[Sequence[Figures]], str]) -> None:
    print(f"| trace | {' | '.join(MARGINS)} |\n|{' --- |' * (len(MARGINS) + 1)}")
    for source in dict.fromkeys(source for source, _ in found):
        print(f"| {name_of(source)} | {' | '.join(cell(found[source, name]) for name in MARGINS)} |", flush=True)


def _times(runs: Sequence[Figures]) -> str:
    hit_rate, mean_s, p99_s = (
        fmean(getattr(one, field) for one in runs) for field in ("hit_rate", "ttft_mean_s", "ttft_p99_s")
    )
    return f"{hit_rate:.1%}, {duration(mean_s)}, {duration(p99_s)}"


def _shares_of_new(runs: Sequence[Figures]) -> str:
    return "; ".join(f"{fmean(shares[NEWEST] for shares in one):.1%}" for one in _columns(runs))


def _shares(runs: Sequence[Figures]) -> str:
    return "; ".join(f"{fmean(map(min, one)):.1%} to {fmean(map(max, one)):.1%}" for one in _columns(runs))


def _columns(runs: Sequence[Figures]) -> Iterator[list[tuple[float, ...]]]:
    yield [one.requests for one in runs]
    yield [one.hits for one in runs]


# ---- in a process of its own


def figures(case: Case) -> Figures:
    trace = trace_of(case.trace)
    trace = replace(trace, requests=trace.requests[:REQUESTS])
    trace = at_rate(trace, case.load * REPLICAS * SETTINGS.prefill_tokens_per_s)
    trace = jittered(trace, JITTER_S, case.seed)
    settings = SETTINGS.up_to(SETTINGS.most_tokens(trace))
    jobs, middle_s = list(jobs_of(trace)), trace.span_s / 2
    fleet = SimulatedFleet(settings, "cost", trace.block_tokens, case.seed)
    counted = jobs
    if case.is_added:
        fleet.joins(NEWEST, middle_s, NOT_STARTED)
        jobs = [job for job in jobs if job.request.at_s < middle_s + COUNTED * trace.span_s]
        counted = [job for job in jobs if job.request.at_s >= middle_s]
    with patch.dict(POLICIES, {"cost": partial(near, MARGINS[case.ties])}):
        fleet.run(jobs, lambda: None)
    return _figures([job for job in counted if not job.is_refused])


def _figures(jobs: Sequence[Job]) -> Figures:
    ttfts_s = sorted(job.ttft_s for job in jobs)
    went, found = [0] * REPLICAS, [0] * REPLICAS
    for job in jobs:
        went[job.replica] += 1
        found[job.replica] += job.request.input_tokens - job.uncached_tokens
    return Figures(
        fmean(ttfts_s),
        percentile(ttfts_s, 0.99),
        sum(found) / sum(job.request.input_tokens for job in jobs),
        tuple(count / len(jobs) for count in went),
        tuple(tokens / max(1, sum(found)) for tokens in found),
    )


def near(margin: Margin, decision: Decision, rng: Draws, ring: Ring | None) -> int:
    """The shipped choice, unless another replica answers nearly as soon and has more room."""
    index = USUAL(decision, rng, ring)
    candidates = decision.candidates
    if margin.room is None or (candidates[index].queued_tokens and not margin.waits):
        return index
    most_s = decision.ttft_of(index) * (1 + margin.share) + margin.s
    able = [one for one, cost in enumerate(decision.costs) if cost < INFINITE and decision.ttft_of(one) <= most_s]
    room = [margin.room(candidate, decision.question.tokens) for candidate in candidates]
    best = max(able, key=room.__getitem__)
    return best if room[best] > room[index] else index


USUAL = POLICIES["cost"]
