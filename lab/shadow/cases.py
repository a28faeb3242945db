"""The records of each model as a trace, with the replicas that serve it."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lab.shadow.following import Followed
from lab.shadow.record import Record
from lab.shadow.speeds import Speeds
from lab.simulation.settings import Settings
from lab.trace.formats import beginnings_named
from lab.trace.requests import Trace, TraceRequest
from router.placement.index import APPROXIMATE, USUAL_APPROXIMATE_BLOCK_TOKENS


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
