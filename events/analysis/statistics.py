"""The figures of `warmroute events stat`: counted as the stream goes by, put together on demand."""

import math
from collections import deque
from collections.abc import Iterable
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from events.analysis.tree import place
from events.cache.changes import Change, Removed, Stored
from events.messages import BlockRemoved, BlockStored, EventBatch, Frames
from events.stream.actions import Action, Apply
from events.view import CacheView

REMEMBERED_KEYS = 200_000
LAGS_KEPT = 20_000
CLOCK_SLACK_S = 0.5


class Counts(Struct):
    batches: int = 0
    events: int = 0
    stored_blocks: int = 0
    removed_blocks: int = 0


class Statistics:
    """`received` for every message as it comes, `acted` for every action of the view with its changes of keys."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.restored_blocks = 0  # stored again within the last REMEMBERED_KEYS removals: evicted too early
        self._gone: dict[tuple[str, int], None] = {}  # places and keys
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

    def acted(self, action: Action, batch: EventBatch | None, changes: Iterable[Change]) -> None:
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
        for change in changes:
            if isinstance(change, Stored):
                where = place(change.medium, change.group)
                for key in change.keys:
                    if (where, key) in self._gone:
                        del self._gone[where, key]
                        self.restored_blocks += 1
            elif isinstance(change, Removed):
                where = place(change.medium, change.group)
                self._gone.update(dict.fromkeys((where, key) for key in change.keys))
                while len(self._gone) > REMEMBERED_KEYS:
                    del self._gone[next(iter(self._gone))]

    def report(self, view: CacheView) -> dict[str, Any]:
        """Return all figures, as JSON has them."""
        counts = asdict(self.counts)
        span_s = (self._last_ts or 0.0) - (self._first_ts or 0.0)
        lag: dict[str, Any] | None = None  # the time of receipt minus the batch's own time stamp, of live batches
        if lags := sorted(self._lags):
            least_s, note = self._least_lag_s, None
            if least_s < 0:
                note = f"clocks differ: a batch came {-least_s:.3g} s before it was sent"
            elif least_s > CLOCK_SLACK_S:
                note = f"never below {least_s:.3g} s: the clocks differ, or batches wait before they are sent"
            p50_s, p99_s = lags[len(lags) // 2], lags[int(len(lags) * 0.99)]
            lag = {"p50_s": p50_s, "p99_s": p99_s, "most_s": lags[-1], "least_s": least_s, "note": note}
        return {
            "replica": view.name,
            "inexact": view.inexact,
            "last_seq": view.stream.last_seq,
            "span_s": span_s,
            "counts": counts,
            "rates": {name: count / (span_s or math.inf) for name, count in counts.items()},
            "resident": [
                {"medium": place(pool.medium, pool.group), "blocks": len(pool)}
                for _, pool in sorted(view.resolver.pools.items())
                if len(pool)
            ],
            "restored_blocks": self.restored_blocks,
            "lag": lag,
            "stream": asdict(view.stream.stats),
            "resolver": asdict(view.resolver.stats),
            "orphans_waiting": view.resolver.orphan_blocks,
        }
