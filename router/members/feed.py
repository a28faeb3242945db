"""The replicas' event streams, applied to the index; a FeedState describes each stream."""

import math
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import NamedTuple

from msgspec.structs import replace

from events.cache.changes import Change, Cleared, RecentChanges, Removed, Stored
from events.cache.resolver import Resolver
from events.messages import EventBatch
from events.native import Status
from events.source import Source
from events.stream.actions import Action, Apply, Reset
from events.subscriber import Subscriber
from events.view import CacheView
from router.members.spec import MAX_BLOCK_TOKENS
from router.placement.index import PrefixIndex
from router.responses import FeedState

MAX_SIZES = 16  # block sizes of one replica
MAX_UNKNOWN = 16  # names of event types and fields that are told of one replica
REACHED_WITHIN_S = 3.0  # a socket that was not connected by then is said not to be reached
READ_ANEW_PAUSE_S = 30.0  # between two full reads of one replica
SETTLED_S = 2.0  # after an answer: all that was published before it has come
MAX_FINDS = 64  # answers whose reused blocks wait for that
STOOD_STILL = "the router stood still: events of that time have not been read"
RESYNC = "the replica's reported cached tokens differ from its events"


class Moment(NamedTuple):
    resets: int
    changes: int
    exact: bool
    unknown_removals: int = 0  # removals of blocks that the view did not know
    batch: int | None = None  # the last one that was known


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
        subscriber: Subscriber | None = None,
    ) -> None:
        """`hashes_are_keys`: by default true for a native source. `subscriber`: None if others bring the messages."""
        self.source = source
        self._subscriber = subscriber
        self._on_sizes = on_sizes
        self._clock = clock
        self.left = False
        native = source.native if hashes_are_keys is None else hashes_are_keys
        self.view = CacheView(
            source.name,
            source.stream(),
            Resolver(source.model, native=native, intern=index.intern),
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
        self.stored = self.removed = 0  # blocks, as often as they came
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

    # ---- changes

    @property
    def inexact(self) -> str | None:
        """Why the view may differ from the replica's cache now; None: it is exact."""
        stands_still = self._subscriber is not None and self._subscriber.stands_still
        return STOOD_STILL if stands_still else self.view.inexact

    def moment(self) -> Moment:
        """The present point in the replica's stream."""
        recent = self._recent
        return Moment(
            recent.resets,
            recent.latest,
            self.inexact is None,
            self.view.resolver.doubtful.unknown_removals,
            self.view.stream.last_seq,
        )

    def has_changed(self, since: Moment, keys: Collection[int], *, stored: bool) -> bool | None:
        """Tell whether one of the blocks was stored, or removed, since then; None: too much has changed to tell."""
        return None if self.left else self._recent.has_changed(since.resets, since.changes, keys, stored=stored)

    def is_settled(self, since_s: float) -> bool:
        """Tell whether all that was published by then has come, as far as the stream can tell."""
        heard_s = self.view.stream.heard_s
        return self.view.inexact is None and heard_s is not None and heard_s >= since_s

    @property
    def has_groups(self) -> bool:
        """Return True if the replica looks for hits in several groups of blocks, or in windows."""
        return self.view.resolver.groups.layout is not None

    def expect_clear(self) -> None:
        """Note that the replica may clear its cache: its view is in doubt until its events show whether it has."""
        self.view.may_be_cleared, self._clear_asked_s = True, self._clock()

    def found(self, since: Moment, keys: list[int], *, sure: bool) -> None:
        """Note blocks that the replica has reused for a request decided at that point. `sure`: the keys are exact.

        They were resident after the last loss, if the request came later.
        """
        resolver = self.view.resolver
        if since.resets == self._recent.resets and (resolver.doubtful or (sure and resolver.learns_from_hits)):
            self._finds.append(Find(self._clock() + SETTLED_S, since, keys, sure))

    def tick(self) -> None:
        """Take the blocks found whose stores and removals must have come by now."""
        while self._finds and self._finds[0].due_s <= self._clock():
            if self.view.busy or not self.view.stream.settled:
                return
            find = self._finds.popleft()
            if find.since.resets != self._recent.resets:
                continue
            resolver = self.view.resolver
            # No removal since the decision can be of one of the blocks.
            is_known = find.sure and find.since.unknown_removals == resolver.doubtful.unknown_removals
            proved = is_known and self.has_changed(find.since, find.keys, stored=False) is False
            if new := resolver.found(find.keys, proved=proved):
                self._index.store(self._slot, new)

    # ---- how much it may hold

    def limit(self, gpu_blocks: int | None, cacheable_blocks: int | None = None) -> None:
        """Set the number of blocks in the replica's GPU pool; if it has claimed too many, read its cache again.

        `cacheable_blocks`: those of them that can hold a prefix.
        """
        capacity = self.view.resolver.capacity
        if (capacity.gpu_blocks, capacity.cacheable_blocks) != (gpu_blocks, cacheable_blocks):
            claimed = capacity.overclaim
            capacity.limit(gpu_blocks, cacheable_blocks)
            if claimed is not None:
                self.resync(claimed)

    def overclaims(self) -> bool | None:
        """Return True if the replica claims more than it can hold; None: not known now.

        Lost removals look the same: after a loss, the replica's cache is read again before it is blamed. So is one
        whose keys its groups have outgrown.
        """
        outgrown, now_s = self.view.resolver.outgrown, self._clock()
        may_read = now_s >= self._read_anew_s + READ_ANEW_PAUSE_S
        if outgrown is not None and may_read and not self.view.busy:
            self._read_anew_s = now_s
            self.resync(outgrown)
            return None
        claimed = self.view.resolver.capacity.overclaim
        if claimed is None:
            return False if self.view.inexact is None else None
        losses = self._losses_of_stream()  # removals may have been lost since the last full read
        if losses <= self._losses or not may_read:
            return True
        if self.view.busy:
            return None
        self._losses, self._read_anew_s = losses, now_s
        self.resync(claimed)
        return False

    def resync(self, reason: str = RESYNC) -> None:
        """Request the replica's whole cache: a snapshot, or a replay from the first batch."""
        if self._subscriber is not None and not self.left:
            self._subscriber.resync(self.source.name, reason)

    def leave(self) -> None:
        """Remove its keys from the index, so that its slot may be dropped."""
        if self.left:
            return
        self.left = True
        if self._subscriber is not None:
            self._subscriber.remove(self.source.name)
        self._index.apply(self._slot, Cleared(self.view.resolver.held()))

    @property
    def block_sizes(self) -> tuple[int, ...]:
        layout = self.view.resolver.groups.layout
        return tuple(sorted(self._block_sizes)) if layout is None else (layout.unit,)

    @property
    def is_unreached(self) -> bool:
        """Return True if it was never reached though there was time."""
        self._reached = self._reached or self.view.stream.online
        return not self._reached and self._clock() - self._since_s > REACHED_WITHIN_S

    @property
    def event_age_s(self) -> float:
        """Seconds since its last event; infinite if there was none."""
        return math.inf if self.last_event_s is None else self._clock() - self.last_event_s

    def state(self) -> FeedState:
        stream, reason, unreached = self.view.stream, self.view.inexact, self.is_unreached
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
            last_event_age_s=None if self.last_event_s is None else self.event_age_s,
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

    def _changed(self, change: Change) -> None:
        if self.left:  # a callback may drop it while a batch is being applied; its slot may be another's now
            return
        self._index.apply(self._slot, change)
        if isinstance(change, Stored):
            self.stored += len(change.keys)
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
            self.removed += len(change.keys)
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


class Feeds:
    """All feeds and their subscriber; create and use it on the thread of the event loop.

    `on_status` may add and remove replicas, the one it was called for included.
    """

    def __init__(
        self,
        index: PrefixIndex,
        on_status: Callable[[str, Status], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._index, self._on_status, self._clock = index, on_status, clock
        self._subscriber = Subscriber(clock)
        self._feeds: list[ReplicaFeed] = []

    def follow(self, name: str, slot: int, source: Source, on_sizes: Callable[[], None] = lambda: None) -> ReplicaFeed:
        """Follow a replica's events; raise ValueError if the name is taken or an address cannot be followed.

        `on_sizes` is called while a batch is being applied: its blocks turn out to have another size.
        """
        own, clock = replace(source, name=name), self._clock
        feed = ReplicaFeed(self._index, slot, own, on_sizes=on_sizes, clock=clock, subscriber=self._subscriber)

        def heard(status: Status) -> None:
            if not feed.left:
                self._on_status(name, status)

        self._subscriber.add(feed.source, feed.view, on_status=heard)
        self._feeds.append(feed)
        return feed

    def tick(self) -> None:
        self._feeds = [feed for feed in self._feeds if not feed.left]
        for feed in self._feeds:
            feed.tick()

    def close(self) -> None:
        for feed in self._feeds:
            feed.leave()
        self._subscriber.close()
