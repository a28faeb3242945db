"""The records of each model as a trace, with the replicas that serve it.

What replicas do not tell of their size and speed is assumed, and named.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from lab.shadow.engines import Counted
from lab.shadow.following import Followed
from lab.shadow.record import Record
from lab.simulation.settings import Settings
from lab.trace.formats import beginnings_named
from lab.trace.requests import Trace, TraceRequest
from router.placement.index import APPROXIMATE, USUAL_APPROXIMATE_BLOCK_TOKENS

USUAL = Settings()
USUAL_OUTPUT_TOKENS = 128
ASSUMED_RATE = f"{USUAL.prefill_tokens_per_s:,.0f} prefill tokens/s in each replica; give --prefill-rate"


class Speeds(Struct, frozen=True, kw_only=True):
    """Means over the replicas; `assumed` says in words what nobody told."""

    capacity_tokens: int
    prefill_tokens_per_s: float  # as told, or counted
    pace_tokens_per_s: float  # of the twin, which computes one prompt at a time
    decode_tokens_per_s: float
    output_tokens: int  # of an answer whose length is unknown
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
    records: Sequence[Record]  # in the order of their times
    replicas: Sequence[str]
    trace: Trace
    settings: Settings


def cases_of(records: Iterable[Record], replicas: Sequence[Followed], speeds: Speeds) -> tuple[list[Case], int]:
    """One case for each model, and the number of requests that are left out of them."""
    by_model: dict[str, list[Record]] = {}
    for record in records:
        by_model.setdefault(record.model, []).append(record)
    cases, left_out = [], 0
    for model, own in by_model.items():
        case = _case(own, [one for one in replicas if model in one.models], speeds)
        left_out += len(own) - (0 if case is None else len(case.records))
        if case is not None:
            cases.append(case)
    return cases, left_out


def _case(records: Sequence[Record], replicas: Sequence[Followed], speeds: Speeds) -> Case | None:
    """The requests whose blocks have the most common size, that fit into a cache, and of which it is known where they
    went; None: there are none.
    """
    names = [one.name for one in replicas]
    size = Counter(record.block_tokens for record in records).most_common(1)[0][0]
    block_tokens = size or USUAL_APPROXIMATE_BLOCK_TOKENS
    most = speeds.capacity_tokens // block_tokens * block_tokens
    kept = [
        record
        for record in records
        if record.block_tokens == size and record.tokens <= most and record.replica in names
    ]
    if not kept:
        return None
    kept.sort(key=lambda record: record.ts)
    settings = Settings(
        replicas=len(names),
        capacity_tokens=speeds.capacity_tokens,
        prefill_tokens_per_s=speeds.pace_tokens_per_s,
        decode_tokens_per_s=speeds.decode_tokens_per_s,
        events=size != APPROXIMATE,
        ranked=all(one.native for one in replicas),
    )
    return Case(kept, names, trace_of(kept, names, block_tokens, speeds.output_tokens), settings)


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
