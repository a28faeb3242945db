"""The watched requests once more, in virtual time: as they were served, and as warmroute would place them.

What was seen are caches as the other router has filled them. Only a simulation says what caches would be if warmroute
had decided. Both runs start with empty caches.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from lab.shadow.following import Followed
from lab.shadow.record import Miss, Record
from lab.shadow.speeds import Speeds
from lab.simulation.fleet import simulated
from lab.simulation.job import Job
from lab.simulation.settings import Settings
from lab.trace.formats import beginnings_named
from lab.trace.requests import Trace, TraceRequest
from router.placement.placement import APPROXIMATE, USUAL_APPROXIMATE_BLOCK_TOKENS

UNKNOWN_POLICY = "round-robin"  # for requests of which nobody knows where they went


class Side(Struct, frozen=True):
    """Sums over the requests of one run; those of several add up."""

    requests: int = 0
    tokens: int = 0
    computed_tokens: int = 0
    prefill_s: float = 0.0
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
    placed: Side = Side()
    left_out: int = 0  # requests with blocks of another size, or too long for the cache
    refused: int = 0  # requests that waited for room in vain in one of the runs; they count in neither
    misses: tuple[Miss, ...] = ()

    def __add__(self, other: "Twin") -> "Twin":
        return Twin(
            self.served + other.served,
            self.placed + other.placed,
            self.left_out + other.left_out,
            self.refused + other.refused,
            self.misses + other.misses,
        )


def twin_of(
    records: Iterable[Record],
    replicas: Sequence[Followed],
    speeds: Speeds,
    policy: str,
    on_request: Callable[[], None] = lambda: None,
) -> Twin:
    """Run each model's requests at the replicas that serve it."""
    by_model: dict[str, list[Record]] = {}
    for record in records:
        by_model.setdefault(record.model, []).append(record)
    twin = Twin()
    for model, own in by_model.items():
        serving = [one for one in replicas if model in one.models]
        twin += _of_model(own, serving, speeds, policy, on_request) if serving else Twin(left_out=len(own))
    return twin


def _of_model(
    records: Sequence[Record], replicas: Sequence[Followed], speeds: Speeds, policy: str, on_request: Callable[[], None]
) -> Twin:
    size = Counter(record.block_tokens for record in records).most_common(1)[0][0]
    block_tokens = size or USUAL_APPROXIMATE_BLOCK_TOKENS
    most = speeds.capacity_tokens // block_tokens * block_tokens
    kept = sorted(
        (record for record in records if record.block_tokens == size and record.tokens <= most),
        key=lambda record: record.ts,
    )
    if not kept:
        return Twin(left_out=len(records))
    names = [one.name for one in replicas]
    trace = trace_of(kept, names, block_tokens, speeds.output_tokens)
    settings = Settings(
        replicas=len(names),
        capacity_tokens=speeds.capacity_tokens,
        prefill_tokens_per_s=speeds.prefill_tokens_per_s,
        decode_tokens_per_s=speeds.decode_tokens_per_s,
        events=size != APPROXIMATE,
        ranked=all(one.native for one in replicas),
    )
    as_served = replace(settings, as_served=True, ranked=False, replica_limit=0)
    served = simulated(trace, as_served, UNKNOWN_POLICY, 0, on_request)
    placed = simulated(trace, settings, policy, 0, on_request)
    pairs = [
        (one, other) for one, other in zip(served, placed, strict=True) if not (one.is_refused or other.is_refused)
    ]
    return Twin(
        _side((one for one, _ in pairs), speeds.prefill_tokens_per_s),
        _side((other for _, other in pairs), speeds.prefill_tokens_per_s),
        left_out=len(records) - len(kept),
        refused=len(kept) - len(pairs),
        misses=tuple(_misses(kept, pairs, names)),
    )


def trace_of(records: Sequence[Record], names: Sequence[str], block_tokens: int, output_tokens: int) -> Trace:
    """The records, in the order of their times, as a trace that says where each request went."""
    numbers = {name: number for number, name in enumerate(names)}
    requests = [
        TraceRequest(
            record.ts - records[0].ts,
            record.tokens,
            record.output_tokens or output_tokens,
            (*record.keys, -1 - number) if record.tokens > len(record.keys) * block_tokens else tuple(record.keys),
            replica=None if record.replica is None else numbers.get(record.replica),
        )
        for number, record in enumerate(records)
    ]
    return Trace("watched", block_tokens, beginnings_named(requests))


def _side(jobs: Iterable[Job], prefill_tokens_per_s: float) -> Side:
    side = Side()
    for job in jobs:
        computed, ttft_s = job.uncached_tokens, job.ttft_s
        side += Side(1, job.request.input_tokens, computed, computed / prefill_tokens_per_s, ttft_s)
    return side


def _misses(records: Sequence[Record], pairs: Iterable[tuple[Job, Job]], names: Sequence[str]) -> Iterator[Miss]:
    for served, placed in pairs:
        if placed.uncached_tokens < served.uncached_tokens:
            tokens = served.request.input_tokens
            yield Miss(
                records[served.number].request_id,
                names[served.replica],
                tokens - served.uncached_tokens,
                names[placed.replica],
                tokens - placed.uncached_tokens,
            )
