"""Explains wrong predictions: by the event that makes the router's own index predict what the engine has found."""

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from functools import partial

from msgspec import Struct

from events.blocks import extend_keys, pack_tokens, root_key
from events.cache.resolver import Resolver
from events.messages import Event, EventBatch
from qualification.engines.engine import MODEL, Found
from router.placement.index import PrefixIndex
from router.prompts.pictures import extras_of

LATE_S = 1.0  # an engine publishes within this time after an answer


class Kind(StrEnum):
    LATER = "explained by an event published after the decision"
    UNDER_WAY = "explained by an event on its way to the router"
    NONE = "not explained"


class Wrong(Struct, frozen=True):
    """A prediction that was called exact, and differs from what the engine has found."""

    request_id: str
    found: Found
    predicted: int
    block_size: int
    seq: int  # the last batch that the router knew
    decided_s: float  # since 1970
    ended_s: float

    def __str__(self) -> str:
        return f"{self.request_id}: predicted {self.predicted}, found {self.found.tokens}"

    def keys(self, block_size: int, lookahead: int = 0) -> list[int]:
        root = root_key(MODEL, self.found.adapter, self.found.salt, block_size)
        extras = extras_of(self.found.pictures, block_size)
        return extend_keys(root, pack_tokens(self.found.prompt), block_size, extras, lookahead)


class Explanation(Struct, frozen=True):
    wrong: Wrong
    kind: Kind
    because: str

    def __str__(self) -> str:
        return f"{self.wrong}: {self.kind}: {self.because}"


class Cache:
    """An index of one replica, as its events fill it."""

    def __init__(self) -> None:
        self._resolver = Resolver(MODEL)
        self._index = PrefixIndex()
        self._slot = self._index.add()

    def apply(self, events: Iterable[Event]) -> None:
        for change in self._resolver.apply(events):
            self._index.apply(self._slot, change)

    def predict(self, wrong: Wrong) -> int:
        """Return the cached tokens that a router with this index predicts."""
        layout, most = self._resolver.groups.layout, len(wrong.found.prompt) - 1
        size = wrong.block_size if layout is None else layout.unit
        matches = self._index.match(wrong.keys(size), 1 << self._slot, most, partial(wrong.keys, size))
        return min(matches.lower.get(self._slot, 0), most // size) * size


def explain(wrong: Iterable[Wrong], batches: Sequence[EventBatch]) -> Iterator[Explanation]:
    """Look for each prediction's explanation among the events that the router did not know when it predicted."""
    cache = Cache()
    undecided = sorted(wrong, key=lambda one: one.seq, reverse=True)
    waiting: list[Wrong] = []
    for number, batch in enumerate(batches):
        while undecided and undecided[-1].seq < number:
            one = undecided.pop()
            if (again := cache.predict(one)) == one.predicted:
                waiting.append(one)
            else:
                yield Explanation(one, Kind.NONE, f"the events up to batch {one.seq} predict {again}")
        for one in [one for one in waiting if batch.ts > one.ended_s + LATE_S]:
            waiting.remove(one)
            yield Explanation(one, Kind.NONE, f"no event of batches {one.seq + 1} to {number - 1}")
        if not waiting:
            cache.apply(batch.events)
            continue
        for event in batch.events:
            cache.apply([event])
            for one in [one for one in waiting if cache.predict(one) == one.found.tokens]:
                waiting.remove(one)
                yield _explanation(one, number, batch.ts, event)
    for one in waiting + undecided:
        yield Explanation(one, Kind.NONE, f"no event after batch {one.seq}, the last that the router knew")


def _explanation(wrong: Wrong, number: int, published_s: float, event: Event) -> Explanation:
    after_ms = 1000 * (published_s - wrong.decided_s)
    when = f"{abs(after_ms):.1f} ms {'after' if after_ms > 0 else 'before'} the decision"
    because = f"{type(event).__name__} in batch {number}, {when}; the router knew batch {wrong.seq}"
    return Explanation(wrong, Kind.LATER if after_ms > 0 else Kind.UNDER_WAY, because)
