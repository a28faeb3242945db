"""The figures of `warmroute events stat`: counted as the stream goes by, put together on demand."""

import math
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from events.analysis.tree import Tree, media, place
from events.cache.changes import Change, Cleared, Removed, Stored
from events.messages import BlockRemoved, BlockStored, EventBatch, Frames
from events.stream.actions import Action, Apply
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
    batches: int = 0
    events: int = 0
    stored_blocks: int = 0
    removed_blocks: int = 0


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

    def report(self, view: CacheView, tree: Tree) -> dict[str, Any]:
        """Return all figures, as JSON has them."""
        counts, lives, last = asdict(self.counts), self.lifetimes, self._last_ts or 0.0
        span_s = last - (self._first_ts or 0.0)
        ages = dict(zip(("p10_s", "p50_s", "p90_s", "p99_s"), lives.quantiles(FRACTIONS, last), strict=True))
        lived = {"evicted": lives.ended, "censored": lives.censored(), "without_start": lives.without_start}
        return {
            "replica": view.name,
            "inexact": view.inexact,
            "last_seq": view.stream.last_seq,
            "span_s": span_s,
            "counts": counts,
            "rates": {name: count / (span_s or math.inf) for name, count in counts.items()},
            "resident": resident(tree, view.name),
            "restored_blocks": lives.restored,
            "lives": {**ages, **lived},
            "lag": self._lag(),
            "stream": asdict(view.stream.stats),
            "resolver": asdict(view.resolver.stats),
            "orphans_waiting": view.resolver.orphan_blocks,
        }

    def _lag(self) -> dict[str, Any] | None:
        """The time of receipt minus the batch's own time stamp, of live batches."""
        if not self._lags:
            return None
        lags, least_s, note = sorted(self._lags), self._least_lag_s, None
        if least_s < 0:
            note = f"clocks differ: a batch came {-least_s:.3g} s before it was sent"
        elif least_s > CLOCK_SLACK_S:
            note = f"never below {least_s:.3g} s: the clocks differ, or batches wait before they are sent"
        p50_s, p99_s = lags[len(lags) // 2], lags[int(len(lags) * 0.99)]
        return {"p50_s": p50_s, "p99_s": p99_s, "most_s": lags[-1], "least_s": least_s, "note": note}


def resident(tree: Tree, replica: str) -> list[dict[str, Any]]:
    """Return the blocks and tokens that each medium of the replica holds."""
    blocks: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for node in tree.nodes.values():
        for medium in set(media(node, replica)):
            blocks[medium] += 1
            tokens[medium] += node.tokens
    return [{"medium": medium, "blocks": blocks[medium], "tokens": tokens[medium]} for medium in sorted(blocks)]
