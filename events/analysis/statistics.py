"""The figures of `warmroute events stat`: counted as the stream goes by, put together on demand."""

import math
from collections import Counter, deque
from collections.abc import Iterable

from msgspec import Struct

from events.analysis.tree import Tree, place
from events.cache.changes import Change, Cleared, Removed, Stored
from events.cache.pools import ResolverStats
from events.messages import BlockRemoved, BlockStored, EventBatch, Frames
from events.stream.actions import Action, Apply
from events.stream.states import StreamStats
from events.view import CacheView

BUCKETS_PER_DECADE = 50  # ages are kept to 5 %: memory does not grow with the stream
SHORTEST_S = 1e-6
REMEMBERED_KEYS = 200_000
LAGS_KEPT = 20_000
CLOCK_SLACK_S = 0.5
FRACTIONS = (0.1, 0.5, 0.9, 0.99)

Place = tuple[str, int]  # medium, key


class Lifetimes:
    def __init__(self) -> None:
        self.ended = 0
        self.restored = 0  # stored again within the last REMEMBERED_KEYS removals: evicted too early
        self.without_start = 0  # ended, but in the cache before the stream was followed: not used
        self._since: dict[Place, float | None] = {}
        self._gone: dict[Place, None] = {}
        self._ended: Counter[int] = Counter()
        self._censored: Counter[int] = Counter()

    def stored(self, medium: str, keys: Iterable[int], at_s: float | None) -> None:
        """`at_s` is None for blocks that were there before (a snapshot)."""
        for key in keys:
            place = (medium, key)
            self._since.setdefault(place, at_s)
            if place in self._gone:
                del self._gone[place]
                self.restored += 1

    def removed(self, medium: str, keys: Iterable[int], at_s: float) -> None:
        for key in keys:
            place = (medium, key)
            if place not in self._since:
                continue
            since = self._since.pop(place)
            self._gone[place] = None
            if since is None:
                self.without_start += 1
            else:
                self.ended += 1
                self._ended[_bucket(at_s - since)] += 1
        while len(self._gone) > REMEMBERED_KEYS:
            del self._gone[next(iter(self._gone))]

    def cleared(self, at_s: float) -> None:
        """The cache was cleared or the replica restarted: how long these blocks would have stayed is not known."""
        self._censored += self._running(at_s)
        self._since.clear()

    def censored(self) -> int:
        """Blocks of known age that have not been evicted."""
        return self._censored.total() + sum(since is not None for since in self._since.values())

    def quantiles(self, fractions: Iterable[float], now_s: float) -> list[float | None]:
        """The age by which this fraction of blocks is gone; None if too many are still there to say."""
        censored = self._censored + self._running(now_s)
        at_risk = self._ended.total() + censored.total()
        surviving = 1.0
        steps: list[tuple[float, float]] = []  # (fraction gone, age)
        for bucket in sorted(self._ended.keys() | censored.keys()):
            if ended := self._ended[bucket]:
                surviving *= 1 - ended / at_risk
                steps.append((1 - surviving, 10 ** ((bucket + 0.5) / BUCKETS_PER_DECADE)))
            at_risk -= ended + censored[bucket]
        return [next((age for gone, age in steps if gone >= fraction - 1e-9), None) for fraction in fractions]

    def _running(self, now_s: float) -> Counter[int]:
        return Counter(_bucket(now_s - since) for since in self._since.values() if since is not None)


def _bucket(age_s: float) -> int:
    return math.floor(math.log10(max(age_s, SHORTEST_S)) * BUCKETS_PER_DECADE)


class Counts(Struct):
    """Totals, or rates per second."""

    batches: float = 0
    events: float = 0
    stored_blocks: float = 0
    removed_blocks: float = 0


class Lag(Struct):
    """Receive time minus the batch's own time stamp, of live batches."""

    p50_s: float
    p99_s: float
    most_s: float
    least_s: float
    note: str | None


class Lives(Struct):
    """Ages at which 10, 50, 90 and 99 % of blocks are evicted; None where too many are still resident to say."""

    p10_s: float | None
    p50_s: float | None
    p90_s: float | None
    p99_s: float | None
    evicted: int
    censored: int
    without_start: int


class Held(Struct):
    medium: str
    blocks: int
    tokens: int


class Report(Struct):
    replica: str
    inexact: str | None
    last_seq: int
    span_s: float
    counts: Counts
    rates: Counts
    resident: list[Held]
    restored_blocks: int
    lives: Lives
    lag: Lag | None
    stream: StreamStats
    resolver: ResolverStats
    orphans_waiting: int


class Statistics:
    """`received` for every message as it comes, `acted` for every action of the view with its changes of keys."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.lifetimes = Lifetimes()
        self._first_ts: float | None = None
        self._last_ts: float | None = None
        self._received_s: dict[int, float] = {}
        self._lags: deque[float] = deque(maxlen=LAGS_KEPT)
        self._least_lag_s = math.inf

    def received(self, socket: str, frames: Frames, at_s: float) -> None:
        if socket == "events" and len(frames) == 3:
            self._received_s.setdefault(int.from_bytes(frames[1], "big"), at_s)
            if len(self._received_s) > LAGS_KEPT:
                del self._received_s[next(iter(self._received_s))]

    def acted(self, action: Action, batch: EventBatch | None, changes: Iterable[Change], at_s: float) -> None:
        ts = None
        if batch is not None and isinstance(action, Apply) and action.seq >= 0:
            ts = batch.ts
            self.counts.batches += 1
            self.counts.events += len(batch.events)
            for event in batch.events:
                if isinstance(event, BlockStored):
                    self.counts.stored_blocks += len(event.block_hashes)
                elif isinstance(event, BlockRemoved):
                    self.counts.removed_blocks += len(event.block_hashes)
            self._first_ts = min(ts, self._first_ts or ts)
            self._last_ts = max(ts, self._last_ts or ts)
            received_s = self._received_s.pop(action.seq, None)
            if received_s is not None:
                self._lags.append(received_s - ts)
                self._least_lag_s = min(self._lags[-1], self._least_lag_s)
        end_s = ts if ts is not None else self._last_ts or at_s
        for change in changes:
            if isinstance(change, Stored):
                self.lifetimes.stored(place(change.medium, change.group), change.keys, ts)
            elif isinstance(change, Removed):
                self.lifetimes.removed(place(change.medium, change.group), change.keys, end_s)
            elif isinstance(change, Cleared):
                self.lifetimes.cleared(end_s)

    def report(self, view: CacheView, tree: Tree) -> Report:
        lives, last, span_s = self.lifetimes, self._last_ts or 0.0, (self._last_ts or 0.0) - (self._first_ts or 0.0)
        p10_s, p50_s, p90_s, p99_s = lives.quantiles(FRACTIONS, last)
        return Report(
            view.name,
            view.inexact,
            view.stream.last_seq,
            span_s,
            self.counts,
            Counts(*(getattr(self.counts, field) / (span_s or math.inf) for field in Counts.__struct_fields__)),
            resident(tree, view.name),
            lives.restored,
            Lives(p10_s, p50_s, p90_s, p99_s, lives.ended, lives.censored(), lives.without_start),
            self._lag(),
            view.stream.stats,
            view.resolver.stats,
            view.resolver.orphan_blocks,
        )

    def _lag(self) -> Lag | None:
        if not self._lags:
            return None
        lags, least_s, note = sorted(self._lags), self._least_lag_s, None
        if least_s < 0:
            note = f"clocks differ: a batch came {-least_s:.3g} s before it was sent"
        elif least_s > CLOCK_SLACK_S:
            note = f"never below {least_s:.3g} s: the clocks differ, or batches wait before they are sent"
        return Lag(lags[len(lags) // 2], lags[int(len(lags) * 0.99)], lags[-1], least_s, note)


def resident(tree: Tree, replica: str) -> list[Held]:
    held: dict[str, Held] = {}
    for node in tree.nodes.values():
        for medium in {holder.medium for holder in node.held if holder.replica == replica}:
            own = held.setdefault(medium, Held(medium, 0, 0))
            own.blocks += 1
            own.tokens += node.tokens
    return [held[medium] for medium in sorted(held)]
