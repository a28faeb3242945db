"""The watched requests once more, in virtual time: as they were served, and as warmroute would place them.

What was seen are caches as the other router has filled them. Only a simulation says what caches would be if warmroute
had decided. Both runs start with empty caches. What replicas do not tell of their size and speed is assumed, and named.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from math import sqrt
from statistics import fmean
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from lab.shadow.placing import Record
from lab.shadow.replicas import Counted, Followed
from lab.simulation.fleet import simulated
from lab.simulation.job import Job
from lab.simulation.settings import Settings
from lab.trace.formats import beginnings_named
from lab.trace.requests import Trace, TraceRequest, coarsened
from router.placement.index import APPROXIMATE, USUAL_APPROXIMATE_BLOCK_TOKENS

SEEDS = 4  # runs of the placement, which draws among equals: their queues differ by a tenth
RUNS = 1 + SEEDS
FIT_WITHIN = 8.0  # times as fast or slow
FIT_RUNS = 9  # to within a hundredth
FIT_BLOCKS = 64  # a prompt's blocks: larger ones make a run faster, and hits hardly any shorter
USUAL = Settings()
USUAL_OUTPUT_TOKENS = 128
ASSUMED_RATE = f"{USUAL.prefill_tokens_per_s:,.0f} prefill tokens/s in each replica; give --prefill-rate"


class Speeds(Struct, frozen=True, kw_only=True):
    """Means over the replicas; `assumed` says in words what nobody told."""

    capacity_tokens: int
    prefill_tokens_per_s: float  # told by an option, or counted
    pace_tokens_per_s: float  # the speed of the twin, which computes one prompt at a time
    decode_tokens_per_s: float
    output_tokens: int  # the assumed length of an answer
    assumed: tuple[str, ...] = ()


def speeds_of(
    replicas: Sequence[Followed],
    counted: Counted,
    *,
    capacity_tokens: int | None = None,
    prefill_tokens_per_s: float | None = None,
) -> Speeds:
    """`counted`: the counters of all replicas together; the other two are what the user says."""
    gap_s = counted.between_tokens_s.value
    capacity = capacity_tokens or _mean(one.capacity_tokens for one in replicas)
    # Computed tokens by the seconds of their prefill: too low if several prompts are computed at once.
    computed = counted.query_tokens - counted.hit_tokens
    counted_rate = computed / counted.prefill_s if counted.prefill_s > 0 and computed > 0 else None
    rate = prefill_tokens_per_s or _mean(one.prefill_tokens_per_s for one in replicas) or counted_rate
    assumed = []
    if capacity is None:
        assumed.append(f"{USUAL.capacity_tokens:,} tokens of KV cache in each replica; give --capacity-tokens")
    if rate is None:
        assumed.append(ASSUMED_RATE)
    return Speeds(
        capacity_tokens=int(capacity or USUAL.capacity_tokens),
        prefill_tokens_per_s=rate or USUAL.prefill_tokens_per_s,
        pace_tokens_per_s=rate or USUAL.prefill_tokens_per_s,
        decode_tokens_per_s=1 / gap_s if gap_s else USUAL.decode_tokens_per_s,
        output_tokens=round(counted.output_tokens.value or USUAL_OUTPUT_TOKENS),
        assumed=tuple(assumed),
    )


def at_pace(speeds: Speeds, pace_tokens_per_s: float) -> Speeds:
    """Take a pace that was fitted to measured times; it is the replicas' rate if nobody told that."""
    others = tuple(each for each in speeds.assumed if each != ASSUMED_RATE)
    rate = speeds.prefill_tokens_per_s if others == speeds.assumed else pace_tokens_per_s
    return replace(speeds, pace_tokens_per_s=pace_tokens_per_s, prefill_tokens_per_s=rate, assumed=others)


def _mean(values: Iterable[float]) -> float | None:
    known = [value for value in values if value > 0]
    return fmean(known) if known else None


class Case(NamedTuple):
    records: Sequence[Record]  # sorted by their times
    replicas: Sequence[str]
    trace: Trace
    settings: Settings


def cases_of(records: Iterable[Record], replicas: Sequence[Followed], speeds: Speeds) -> tuple[list[Case], int]:
    """One case for each model, and the number of requests that are left out of them.

    A case has the requests whose blocks have the most common size, which fit into a cache, and whose replica is known.
    """
    by_model: dict[str, list[Record]] = {}
    for record in records:
        by_model.setdefault(record.model, []).append(record)
    cases, left_out = [], 0
    for model, own in by_model.items():
        serving = [one for one in replicas if model in one.models]
        names = [one.name for one in serving]
        size = Counter(record.block_tokens for record in own).most_common(1)[0][0]
        block_tokens = size or USUAL_APPROXIMATE_BLOCK_TOKENS
        most = speeds.capacity_tokens // block_tokens * block_tokens
        kept = [one for one in own if one.block_tokens == size and one.tokens <= most and one.replica in names]
        left_out += len(own) - len(kept)
        if not kept:
            continue
        kept.sort(key=lambda record: record.ts)
        settings = Settings(
            replicas=len(names),
            capacity_tokens=speeds.capacity_tokens,
            prefill_tokens_per_s=speeds.pace_tokens_per_s,
            decode_tokens_per_s=speeds.decode_tokens_per_s,
            events=size != APPROXIMATE,
            ranked=all(one.native for one in serving),
        )
        cases.append(Case(kept, names, trace_of(kept, names, block_tokens, speeds.output_tokens), settings))
    return cases, left_out


def trace_of(records: Sequence[Record], names: Sequence[str], block_tokens: int, output_tokens: int) -> Trace:
    """The records, which are in the order of their times, as a trace that says where each request went."""
    numbers = {name: number for number, name in enumerate(names)}
    requests = [
        TraceRequest(
            record.ts - records[0].ts,
            record.tokens,
            record.output_tokens or output_tokens,
            (*record.keys, -1 - number) if record.tokens > len(record.keys) * block_tokens else tuple(record.keys),
            replica=numbers[record.replica or ""],
        )
        for number, record in enumerate(records)
    ]
    return Trace("watched", block_tokens, beginnings_named(requests))


class Side(Struct, frozen=True):
    """Sums over the requests of one run, or of several."""

    requests: int = 0
    tokens: int = 0
    computed_tokens: int = 0
    ttft_s: float = 0.0  # the sum over all requests

    @property
    def hit_share(self) -> float:
        return 1 - self.computed_tokens / self.tokens if self.tokens else 0.0

    @property
    def ttft_mean_s(self) -> float:
        return self.ttft_s / self.requests if self.requests else 0.0


class Twin(NamedTuple):
    served: Side
    placed: list[Side]  # the sides of each run
    mean: Side  # over all of those
    refused: int  # requests that waited for room in vain, in the first run; they count in no figure


def twin_of(cases: Iterable[Case], policy: str, on_request: Callable[[], None] = lambda: None) -> Twin:
    served: list[Job] = []
    runs: list[list[Job]] = [[] for _ in range(SEEDS)]
    for case in cases:
        served += _as_served(case, on_request)
        for seed, run in enumerate(runs):
            run += simulated(case.trace, case.settings, policy, seed, on_request)
    refused = sum(job.is_refused for job in runs[0])
    return Twin(side_of(served), [side_of(run) for run in runs], side_of(chain(*runs)), refused)


def fitted_pace(
    cases: Iterable[Case],
    pace_tokens_per_s: float,
    ttft_mean_s: float,
    on_request: Callable[[], None] = lambda: None,
) -> float:
    """The tokens/s of a prefill with which the requests, as they were served, wait as long as was measured."""
    coarse = []
    for case in cases:  # with larger blocks prompts have few of them; the longest has to fit into a cache
        requests, size = case.trace.requests, case.trace.block_tokens
        factor = max(1, sum(len(request.blocks) for request in requests) // len(requests) // FIT_BLOCKS)
        longest = max(request.input_tokens for request in requests)
        while factor > 1 and case.settings.capacity_blocks(factor * size) * factor * size < longest:
            factor //= 2
        coarse.append(case._replace(trace=coarsened(case.trace, factor)))
    slow, fast = pace_tokens_per_s / FIT_WITHIN, pace_tokens_per_s * FIT_WITHIN
    for _ in range(FIT_RUNS):
        middle = sqrt(slow * fast)
        jobs = [job for case in coarse for job in _as_served(case, on_request, middle)]
        if side_of(jobs).ttft_mean_s > ttft_mean_s:
            slow = middle
        else:
            fast = middle
    return sqrt(slow * fast)


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
