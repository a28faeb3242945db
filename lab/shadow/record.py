"""The record of one request: its blocks, where it went, and what warmroute would have chosen then. And their sums."""

from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Literal, TypeAlias

from msgspec import Struct

MOST_REQUESTS = 100_000
MOST_BLOCKS = 16_000_000  # of all prompts: 128 MB

# How it is known where a request went: the file or a header says so; only one replica stored its last block; that block
# was cached before, at one replica; or at several.
Source: TypeAlias = Literal["told", "stored", "held", "one of several"]


class AtOnce(Struct, frozen=True):
    """Warmroute's choice, and the tokens cached at every replica, when the request came."""

    chosen: str
    hits: dict[str, float]

    @property
    def hit(self) -> float:
        return self.hits[self.chosen]


class Record(Struct, kw_only=True):
    ts: float
    request_id: str
    model: str
    tokens: int
    block_tokens: int
    keys: "array[int]"  # of the prompt's full blocks
    exact: bool
    cached_tokens: int | None = None  # as the replica reported
    output_tokens: int | None = None
    ttft_s: float | None = None
    replica: str | None = None  # where it went; None: unknown
    source: Source | None = None
    at_once: AtOnce | None = None  # None: it was seen too late

    @property
    def miss(self) -> "Miss | None":
        """The miss, if more was cached where warmroute would have sent it than where it went."""
        seen, replica = self.at_once, self.replica
        if seen is None or replica is None or seen.hit <= seen.hits.get(replica, seen.hit):
            return None
        return Miss(self.request_id, replica, seen.hits[replica], seen.chosen, seen.hit)


class Miss(Struct, frozen=True):
    """A request that would have found more of its prompt at another replica."""

    request_id: str
    replica: str  # where it went
    hit_tokens: float
    other: str  # where warmroute would have sent it
    other_hit_tokens: float

    @property
    def tokens(self) -> float:
        return self.other_hit_tokens - self.hit_tokens


class Records:
    """The newest requests, as many as there is room for."""

    def __init__(self, most_requests: int = MOST_REQUESTS, most_blocks: int = MOST_BLOCKS) -> None:
        self.dropped = 0
        self._most_requests = most_requests
        self._most_blocks = most_blocks
        self._kept: deque[Record] = deque()
        self._blocks = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._kept)

    def add(self, record: Record) -> None:
        self._kept.append(record)
        self._blocks += len(record.keys)
        while len(self._kept) > self._most_requests or self._blocks > self._most_blocks:
            self._blocks -= len(self._kept.popleft().keys)
            self.dropped += 1


class AtOnceSums(Struct, frozen=True):
    """Requests of which it is known where they went and what was cached then."""

    requests: int = 0
    tokens: int = 0
    served_hit: float = 0.0
    chosen_hit: float = 0.0


def at_once_sums(records: Iterable[Record]) -> AtOnceSums:
    requests = tokens = 0
    served_hit = chosen_hit = 0.0
    for record in records:
        seen = record.at_once
        if seen is not None and record.replica in seen.hits:
            requests, tokens = requests + 1, tokens + record.tokens
            served_hit, chosen_hit = served_hit + seen.hits[record.replica], chosen_hit + seen.hit
    return AtOnceSums(requests, tokens, served_hit, chosen_hit)
