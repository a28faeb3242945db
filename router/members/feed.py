"""One replica's event stream, applied to the index."""

import math
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import NamedTuple

from msgspec import Struct

from events.cache.changes import Change, Cleared, RecentChanges, Removed, Stored
from events.cache.resolver import Resolver
from events.messages import EventBatch
from events.source import Source
from events.stream.actions import Action, Apply, Reset
from events.view import CacheView
from router.members.spec import MAX_BLOCK_TOKENS
from router.placement.index import PrefixIndex
from router.responses import FeedState

MAX_SIZES = 16  # block sizes of one replica
MAX_UNKNOWN = 16  # names of event types and fields that are told of one replica
REACHED_WITHIN_S = 3.0  # a socket that was not connected by then is said not to be reached
READ_ANEW_PAUSE_S = 30.0  # between two full reads of one replica after losses in its stream
SETTLED_S = 2.0  # after an answer: all that was published before it has come
MAX_FINDS = 64  # answers whose reused blocks wait for that


class Traffic(Struct, frozen=True):
    """Counts of one replica's stream so far."""

    batches: int
    stored: int  # blocks that got a key, as often as they came
    removed: int
    digests_compared: int


class Moment(NamedTuple):
    resets: int
    changes: int
    exact: bool
    unknown_removals: int = 0  # removals of blocks that the view did not know


class Find(NamedTuple):
    """Blocks that a request has reused, until everything published before its answer has come."""

    due_s: float
    since: Moment  # the request was decided
    keys: list[int]
    sure: bool  # the keys are exact


class ReplicaFeed:
    """One replica's view, and the slot it fills."""

    def __init__(
        self,
        index: PrefixIndex,
        slot: int,
        source: Source,
        *,
        hashes_are_keys: bool | None = None,
        on_sizes: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`hashes_are_keys`: by default true for a native source."""
        self.source = source
        self._on_sizes = on_sizes
        self._clock = clock
        self.left = False
        native = source.native if hashes_are_keys is None else hashes_are_keys
        self.view = CacheView(
            source.name,
            source.stream(),
            Resolver(source.model, native=native, keyed=native and not source.native, intern=index.intern),
            skim=source.native,
            sliced=True,
            on_change=self._changed,
            on_action=self._acted,
        )
        self._index = index
        self._slot = slot
        self._block_sizes: set[int] = set()
        self._sizes_are_old = False  # they are from before the last reset, and kept until something is stored
        self.last_event_s: float | None = None
        self._stored = self._removed = 0  # blocks, since ever
        self._losses = 0  # losses of the stream at the last full read for them
        self._read_anew_s = -math.inf
        self._recent = RecentChanges()
        self._finds: deque[Find] = deque(maxlen=MAX_FINDS)
        self._clear_asked_s = -math.inf
        self._since_s = self._clock()
        self._reached = False  # it was connected once

    def _losses_of_stream(self) -> int:
        """Count lost batches and reconnects: without a replay, events between two connections are unknown."""
        stats = self.view.stream.stats
        return 0 if self.source.native else stats.lost_batches + stats.reconnects

    def may_have_lost(self, now_s: float) -> bool:
        """True if removals may have been lost since the last full read, and the pause after it is over."""
        return self._losses_of_stream() > self._losses and now_s >= self._read_anew_s + READ_ANEW_PAUSE_S

    def reads_anew(self, now_s: float) -> None:
        self._losses, self._read_anew_s = self._losses_of_stream(), now_s

    # ---- what has changed

    def moment(self, *, standstill: bool = False) -> Moment:
        exact = self.view.inexact is None and not standstill
        return Moment(self._recent.resets, self._recent.latest, exact, self.view.resolver.doubtful.unknown_removals)

    def has_changed(self, since: Moment, keys: Collection[int], *, stored: bool) -> bool | None:
        return self._recent.has_changed(since.resets, since.changes, keys, stored=stored)

    def is_settled(self, since_s: float) -> bool:
        heard_s = self.view.stream.heard_s
        return self.view.inexact is None and heard_s is not None and heard_s >= since_s

    def expect_clear(self, now_s: float) -> None:
        self.view.may_be_cleared, self._clear_asked_s = True, now_s

    def found(self, since: Moment, keys: list[int], now_s: float, *, sure: bool) -> bool:
        """Learn of blocks that a request has reused: they were resident after the last loss, if it came later."""
        resolver = self.view.resolver
        if since.resets != self._recent.resets or not (resolver.doubtful or (sure and resolver.learns_from_hits)):
            return False
        self._finds.append(Find(now_s + SETTLED_S, since, keys, sure))
        return True

    def tick(self, now_s: float) -> bool:
        """Take the blocks found whose stores and removals must have come by now; return whether any are left."""
        while self._finds and self._finds[0].due_s <= now_s:
            if self.view.busy or not self.view.stream.settled:
                return True
            find = self._finds.popleft()
            if find.since.resets != self._recent.resets:
                continue
            resolver = self.view.resolver
            # No removal since the decision can be of one of the blocks.
            is_known = find.sure and find.since.unknown_removals == resolver.doubtful.unknown_removals
            proved = is_known and self.has_changed(find.since, find.keys, stored=False) is False
            if new := resolver.found(find.keys, proved=proved):
                self._index.store(self._slot, new)
        return bool(self._finds)

    def leave(self) -> None:
        self.left = True
        self._index.apply(self._slot, Cleared(self.view.resolver.held()))

    @property
    def block_sizes(self) -> tuple[int, ...]:
        layout = self.view.resolver.groups.layout
        return tuple(sorted(self._block_sizes)) if layout is None else (layout.unit,)

    def is_unreached(self, now_s: float) -> bool:
        self._reached = self._reached or self.view.stream.online
        return not self._reached and now_s - self._since_s > REACHED_WITHIN_S

    def state(self, now_s: float) -> FeedState:
        stream, reason = self.view.stream, self.view.inexact
        unreached = self.is_unreached(now_s)
        if unreached:
            reason = f"its event socket {self.source.events} was never reached: check the address, firewall and keys"
        elif not stream.online and self._reached:
            reason = f"its event socket {self.source.events} is not connected"
        return FeedState(
            exact=reason is None,
            reason=reason,
            partial=reason is not None and stream.settled and not self.view.busy,
            connected=stream.online,
            block_sizes=self.block_sizes,
            last_event_age_s=None if self.last_event_s is None else now_s - self.last_event_s,
            lag_batches=stream.lag_batches,
            seq=stream.last_seq,
            incarnation=stream.incarnation,
            gaps=stream.stats.gaps,
            lost_batches=stream.stats.lost_batches,
            replays=stream.stats.replays,
            snapshots=stream.stats.snapshots,
            reconnects=stream.stats.reconnects,
            restarts=stream.stats.restarts,
            digest_mismatches=stream.stats.digest_mismatches,
            overclaim=self.view.resolver.capacity.overclaim,
            repairs=stream.stats.repairs,
            unknown=self.view.decoder.unknown(MAX_UNKNOWN),
            unreached=unreached,
        )

    def traffic(self) -> Traffic:
        stats = self.view.stream.stats
        return Traffic(stats.batches, self._stored, self._removed, stats.digests_compared)

    def _changed(self, change: Change) -> None:
        if self.left:  # a callback may drop it while a batch is being applied; its slot may be another's now
            return
        self._index.apply(self._slot, change)
        if isinstance(change, Stored):
            self._stored += len(change.keys)
            self._recent.add(change.keys, stored=True)
            size = change.event.block_size
            is_known = size in self._block_sizes and not self._sizes_are_old
            if not is_known and 1 <= size <= MAX_BLOCK_TOKENS:  # a tier that names blocks by hash alone does not say
                if self._sizes_are_old:
                    self._block_sizes.clear()
                    self._sizes_are_old = False
                if len(self._block_sizes) < MAX_SIZES:
                    self._block_sizes.add(size)
                    self._on_sizes()
        elif isinstance(change, Removed):
            self._removed += len(change.keys)
            self._recent.add(change.keys, stored=False)
        else:
            self._recent.reset()
            if isinstance(change, Cleared):  # nothing is claimed now that a loss could have made wrong
                self._losses = self._losses_of_stream()
            else:
                self._on_sizes()

    def _acted(self, action: Action, _batch: EventBatch | None) -> None:
        if isinstance(action, Apply):
            self.last_event_s = self._clock()
            is_later = self.last_event_s > self._clear_asked_s + SETTLED_S
            if self.view.may_be_cleared and is_later and self.view.stream.exact:
                self.view.may_be_cleared = False  # this batch or one before would have told
        elif isinstance(action, Reset):
            self._sizes_are_old = True
