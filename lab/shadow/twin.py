"""The watched requests once more, in virtual time: as they were served, and as warmroute would place them.

What was seen are caches as the other router has filled them. Only a simulation says what caches would be if warmroute
had decided. Both runs start with empty caches.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from math import sqrt
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from lab.shadow.cases import Case
from lab.shadow.record import Miss
from lab.simulation.fleet import simulated
from lab.simulation.job import Job
from lab.trace.shaping import coarsened

SEEDS = 4  # runs of the placement, which draws among equals: their queues differ by a tenth
RUNS = 1 + SEEDS
FIT_WITHIN = 8.0  # times as fast or slow
FIT_RUNS = 9  # to within a hundredth
FIT_BLOCKS = 64  # of a prompt: larger blocks make a run faster, and hits hardly any shorter


class Side(Struct, frozen=True):
    """Sums over the requests of one run, or of several."""

    requests: int = 0
    tokens: int = 0
    computed_tokens: int = 0
    ttft_s: float = 0.0  # of all requests together

    @property
    def hit_share(self) -> float:
        return 1 - self.computed_tokens / self.tokens if self.tokens else 0.0

    @property
    def ttft_mean_s(self) -> float:
        return self.ttft_s / self.requests if self.requests else 0.0


class Twin(NamedTuple):
    served: Side
    placed: list[Side]  # of each run
    mean: Side  # over all of those
    refused: int  # requests that waited for room in vain, in the first run; they count in no figure
    misses: list[Miss]  # in the first run


def twin_of(cases: Iterable[Case], policy: str, on_request: Callable[[], None] = lambda: None) -> Twin:
    served: list[Job] = []
    runs: list[list[Job]] = [[] for _ in range(SEEDS)]
    misses: list[Miss] = []
    for case in cases:
        own = _as_served(case, on_request)
        placed = [simulated(case.trace, case.settings, policy, seed, on_request) for seed in range(SEEDS)]
        misses += _misses(case, zip(own, placed[0], strict=True))
        served += own
        for run, jobs in zip(runs, placed, strict=True):
            run += jobs
    refused = sum(job.is_refused for job in runs[0])
    return Twin(side_of(served), [side_of(run) for run in runs], side_of(chain(*runs)), refused, misses)


def fitted_pace(
    cases: Iterable[Case],
    pace_tokens_per_s: float,
    ttft_mean_s: float,
    on_request: Callable[[], None] = lambda: None,
) -> float:
    """The tokens/s of a prefill with which the requests, as they were served, wait as long as was measured."""
    coarse = [case._replace(trace=coarsened(case.trace, _factor(case))) for case in cases]
    slow, fast = pace_tokens_per_s / FIT_WITHIN, pace_tokens_per_s * FIT_WITHIN
    for _ in range(FIT_RUNS):
        middle = sqrt(slow * fast)
        jobs = [job for case in coarse for job in _as_served(case, on_request, middle)]
        if side_of(jobs).ttft_mean_s > ttft_mean_s:
            slow = middle
        else:
            fast = middle
    return sqrt(slow * fast)


def _factor(case: Case) -> int:
    """By how much to enlarge blocks so that prompts have few of them, and the longest still fits into a cache."""
    requests, size = case.trace.requests, case.trace.block_tokens
    factor = max(1, sum(len(request.blocks) for request in requests) // len(requests) // FIT_BLOCKS)
    longest = max(request.input_tokens for request in requests)
    while factor > 1 and case.settings.capacity_blocks(factor * size) * factor * size < longest:
        factor //= 2
    return factor


def _as_served(case: Case, on_request: Callable[[], None], pace_tokens_per_s: float | None = None) -> list[Job]:
    settings = replace(
        case.settings,
        as_served=True,
        ranked=False,
        replica_limit=0,
        prefill_tokens_per_s=pace_tokens_per_s or case.settings.prefill_tokens_per_s,
    )
    return simulated(case.trace, settings, "round-robin", 0, on_request)  # each goes where it went


def side_of(jobs: Iterable[Job]) -> Side:
    known = [job for job in jobs if not job.is_refused]
    return Side(
        len(known),
        sum(job.request.input_tokens for job in known),
        sum(job.uncached_tokens for job in known),
        sum(job.ttft_s for job in known),
    )


def _misses(case: Case, pairs: Iterable[tuple[Job, Job]]) -> Iterator[Miss]:
    for served, placed in pairs:
        if placed.uncached_tokens < served.uncached_tokens and not placed.is_refused:
            tokens = served.request.input_tokens
            yield Miss(
                case.records[served.number].request_id,
                case.replicas[served.replica],
                tokens - served.uncached_tokens,
                case.replicas[placed.replica],
                tokens - placed.uncached_tokens,
            )
