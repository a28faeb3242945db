"""The watched requests once more, in virtual time: as they were served, and as warmroute would place them.

What was seen are caches as the other router has filled them. Only a simulation says what caches would be if warmroute
had decided. Both runs start with empty caches.
"""

from collections.abc import Callable, Iterable, Iterator
from math import sqrt

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
    """Sums over the requests of one run; those of several add up."""

    requests: int = 0
    tokens: int = 0
    computed_tokens: int = 0
    ttft_s: float = 0.0  # of all requests together

    def __add__(self, other: "Side") -> "Side":
        return Side(*(getattr(self, name) + getattr(other, name) for name in self.__struct_fields__))

    @property
    def hit_share(self) -> float:
        return 1 - self.computed_tokens / self.tokens if self.tokens else 0.0

    @property
    def ttft_mean_s(self) -> float:
        return self.ttft_s / self.requests if self.requests else 0.0


class Twin(Struct, frozen=True):
    served: Side = Side()
    placed: tuple[Side, ...] = (Side(),) * SEEDS  # of each run
    refused: int = 0  # requests that waited for room in vain, in the first run; they count in no figure
    misses: tuple[Miss, ...] = ()  # in the first run

    def __add__(self, other: "Twin") -> "Twin":
        return Twin(
            self.served + other.served,
            tuple(one + another for one, another in zip(self.placed, other.placed, strict=True)),
            self.refused + other.refused,
            self.misses + other.misses,
        )

    @property
    def mean(self) -> Side:
        """The sums over all runs of the placement, for means."""
        return sum(self.placed, Side())


def twin_of(cases: Iterable[Case], policy: str, on_request: Callable[[], None] = lambda: None) -> Twin:
    twin = Twin()
    for case in cases:
        served = _as_served(case, on_request)
        runs = [simulated(case.trace, case.settings, policy, seed, on_request) for seed in range(SEEDS)]
        refused, misses = sum(job.is_refused for job in runs[0]), _misses(case, zip(served, runs[0], strict=True))
        twin += Twin(side_of(served), tuple(map(side_of, runs)), refused, tuple(misses))
    return twin


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
    side = Side()
    for job in jobs:
        if job.is_refused:
            continue
        side += Side(1, job.request.input_tokens, job.uncached_tokens, job.ttft_s)
    return side


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
