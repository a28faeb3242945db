"""The replicas' event streams, applied to the index; a FeedState describes each stream."""

import math
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import NamedTuple

import msgspec
from msgspec import Struct

from events.actions import Action, Apply, Reset
from events.changes import Change, Cleared, RecentChanges, Removed, Stored
from events.messages import EventBatch
from events.native import Status
from events.resolver import Resolver
from events.source import Source
from events.subscriber import Subscriber
from events.view import CacheView
from router.members.spec import MOST_BLOCK_TOKENS
from router.placement.index import PrefixIndex
from router.responses import FeedState

MOST_SIZES = 16  # block sizes of one replica
MOST_UNKNOWN = 16  # names of event types and fields that are told of one replica
REACHED_WITHIN_S = 3.0  # a socket that was not connected by then is said not to be reached
READ_ANEW_PAUSE_S = 30.0  # between two full reads of one replica after losses in its stream
STOOD_STILL = "the router stood still: events of that time have not been read"
RESYNC = "the replica's reported cached tokens differ from its events"
SETTLED_S = 2.0  # after an answer: all that was published before it has come
MOST_FINDS = 64  # answers whose reused blocks wait for that


class Traffic(Struct, frozen=True):
    """Counts of one replica's stream so far."""

    batches: int
    stored: int  # blocks that got a key, as often as they came
    removed: int
    digests_compared: int


class Moment(NamedTuple):
    """A point in one replica's stream."""

    resets: int
    changes: int
    exact: bool
    unknown_removals: int = 0  # of blocks that the view did not know


class Find(NamedTuple):
    """Blocks that a request has reused, until everything published before its answer has come."""

    due_s: float
    since: Moment  # the request was decided
    keys: list[int]
    sure: bool  # the keys are exact


class Feeds:
    """All feeds and their subscriber; create and use it on the thread of the event loop.

    `on_status` may add and remove replicas, the one it was called for included. `on_sizes` gets the name of a replica
    whose blocks turn out to have another size; it is called while a batch is being applied.
    """

    def __init__(
        self,
        index: PrefixIndex,
        on_status: Callable[[str, Status], None],
        on_sizes: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._index = index
        self._on_status = on_status
        self._on_sizes = on_sizes
        self._subscriber = Subscriber()
        self._feeds: dict[str, ReplicaFeed] = {}
        self._finding: set[str] = set()  # replicas whose reused blocks are to be taken

    def follow(self, name: str, slot: int, source: Source) -> None:
        """Follow a replica's events; raise ValueError if the name is taken or an address cannot be followed."""
        source = msgspec.structs.replace(source, name=name)
        feed = ReplicaFeed(self._index, slot, source, on_sizes=lambda: self._on_sizes(name))

        def heard(status: Status) -> None:
            if not feed.left:
                self._on_status(name, status)

        self._subscriber.add(feed.source, feed.view, on_status=heard)
        self._feeds[name] = feed

    def leave(self, name: str) -> None:
        """Remove a feed and its keys from the index, so that its slot may be dropped; without a feed, do nothing."""
        feed = self._feeds.pop(name, None)
        if feed is not None:
            self._subscriber.remove(name)
            feed.leave()

    def state(self, name: str) -> FeedState | None:
        """The state of a replica's stream; None if its events are not followed."""
        feed = self._feeds.get(name)
        return None if feed is None else feed.state(time.monotonic())

    def block_sizes(self, name: str) -> tuple[int, ...] | None:
        """The block sizes that a replica's events have shown; None if they are not followed."""
        feed = self._feeds.get(name)
        return None if feed is None else feed.block_sizes

    def is_unreached(self, name: str) -> bool:
        """Return True if a replica's events are followed, and were never reached though there was time."""
        feed = self._feeds.get(name)
        return feed is not None and feed.is_unreached(time.monotonic())

    def traffic(self, name: str) -> Traffic | None:
        feed = self._feeds.get(name)
        return None if feed is None else feed.traffic()

    def known(self, name: str) -> tuple[int, str | None] | None:
        """The last batch applied, and the reason if the state is inexact; None if the replica is not followed."""
        feed = self._feeds.get(name)
        if feed is None:
            return None
        reason = STOOD_STILL if self._subscriber.stands_still else feed.view.inexact
        return feed.view.stream.last_seq, reason

    def moment(self, name: str) -> Moment | None:
        """Return the present point in the replica's stream; None if it is not followed."""
        feed = self._feeds.get(name)
        return None if feed is None else feed.moment(standstill=self._subscriber.stands_still)

    def has_changed(self, name: str, since: Moment, keys: Collection[int], *, stored: bool) -> bool | None:
        """Return whether one of the blocks was stored, or removed, since then; None: too much has changed to tell."""
        feed = self._feeds.get(name)
        return None if feed is None else feed.has_changed(since, keys, stored=stored)

    def has_groups(self, name: str) -> bool:
        """Return whether the replica looks for hits in several groups of blocks, or in windows."""
        feed = self._feeds.get(name)
        return feed is not None and feed.view.resolver.groups.layout is not None

    def is_settled(self, name: str, since_s: float) -> bool:
        """Return whether all that was published by then has come, as far as the stream can tell."""
        feed = self._feeds.get(name)
        return feed is None or feed.is_settled(since_s)

    def found(self, name: str, since: Moment, keys: list[int], *, sure: bool) -> None:
        """Note blocks that the replica has reused for a request decided at that point. `sure`: the keys are exact."""
        feed = self._feeds.get(name)
        if feed is not None and feed.found(since, keys, time.monotonic(), sure=sure):
            self._finding.add(name)

    def expect_clear(self, name: str) -> None:
        """Note that the replica may clear its cache now: its view is in doubt until its events show whether it has."""
        feed = self._feeds.get(name)
        if feed is not None:
            feed.expect_clear(time.monotonic())

    def tick(self) -> None:
        """Time passes."""
        for name in list(self._finding):
            feed = self._feeds.get(name)
            if feed is None or not feed.tick(time.monotonic()):
                self._finding.discard(name)

    def limit(self, name: str, gpu_blocks: int | None, cacheable_blocks: int | None = None) -> None:
        """Set the number of blocks in the replica's GPU pool; if it has claimed too many, read its cache again.

        `cacheable_blocks`: those of them that can hold a prefix.
        """
        feed = self._feeds.get(name)
        if feed is None:
            return
        resolver = feed.view.resolver
        if (resolver.capacity.gpu_blocks, resolver.capacity.cacheable_blocks) == (gpu_blocks, cacheable_blocks):
            return
        claimed = resolver.capacity.overclaim
        resolver.capacity.limit(gpu_blocks, cacheable_blocks)
        if claimed is not None:
            self.resync(name, claimed)

    def speculates(self, name: str, speculates: bool) -> None:
        """Note if the replica drafts tokens, which may make its hits shorter."""
        feed = self._feeds.get(name)
        if feed is not None:
            feed.view.resolver.speculates = speculates

    def overclaims(self, name: str) -> bool | None:
        """Return True if the replica claims more than it can hold; None: not known now.

        Lost removals look the same: after a loss, the replica's cache is read again before it is blamed. So is one
        whose keys its groups have outgrown.
        """
        feed = self._feeds.get(name)
        if feed is None:
            return None
        outgrown = feed.view.resolver.outgrown
        if outgrown is not None and not feed.view.busy:
            self.resync(name, outgrown)
            return None
        claimed = feed.view.resolver.capacity.overclaim
        if claimed is None:
            return False if feed.view.inexact is None else None
        now_s = time.monotonic()
        if not feed.may_have_lost(now_s):
            return True
        if feed.view.busy:
            return None
        feed.reads_anew(now_s)
        self.resync(name, claimed)
        return False

    def resync(self, name: str, reason: str = RESYNC) -> None:
        """Request the replica's whole cache: a snapshot, or a replay from the first batch."""
        if name in self._feeds:
            self._subscriber.resync(name, reason)

    def close(self) -> None:
        for name in list(self._feeds):
            self.leave(name)
        self._subscriber.close()


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
    ) -> None:
        """`hashes_are_keys`: by default true for a native source."""
        self.source = source
        self._on_sizes = on_sizes
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
        self._sizes_are_old = False  # from before the last reset; kept until something is stored
        self._last_event_s: float | None = None
        self._stored = self._removed = 0  # blocks, since ever
        self._losses = 0  # losses of the stream at the last full read for them
        self._read_anew_s = -math.inf
        self._recent = RecentChanges()
        self._finds: deque[Find] = deque(maxlen=MOST_FINDS)
        self._clear_asked_s = -math.inf
        self._since_s = time.monotonic()
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

    def _is_proved(self, find: Find) -> bool:
        """Return True if no removal since the decision can be of one of the blocks."""
        if not find.sure or find.since.unknown_removals != self.view.resolver.doubtful.unknown_removals:
            return False
        return self.has_changed(find.since, find.keys, stored=False) is False

    def tick(self, now_s: float) -> bool:
        """Take the blocks found whose stores and removals must have come by now; return whether any are left."""
        while self._finds and self._finds[0].due_s <= now_s:
            if self.view.busy or not self.view.stream.settled:
                return True
            find = self._finds.popleft()
            if find.since.resets != self._recent.resets:
                continue
            if new := self.view.resolver.found(find.keys, proved=self._is_proved(find)):
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
            last_event_age_s=None if self._last_event_s is None else now_s - self._last_event_s,
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
            unknown=self.view.decoder.unknown(MOST_UNKNOWN),
            unreached=unreached,
        )

    def traffic(self) -> Traffic:
        stats = self.view.stream.stats
        return Traffic(stats.batches, self._stored, self._removed, stats.digests_compared)

    def _changed(self, change: Change) -> None:
        if self.left:  # by a callback, while a batch was being applied; its slot may be another's now
            return
        self._index.apply(self._slot, change)
        if isinstance(change, Stored):
            self._stored += len(change.keys)
            self._recent.add(change.keys, stored=True)
            size = change.event.block_size
            if size not in self._block_sizes or self._sizes_are_old:
                self._sized(size)
        elif isinstance(change, Removed):
            self._removed += len(change.keys)
            self._recent.add(change.keys, stored=False)
        else:
            self._recent.reset()
            if isinstance(change, Cleared):  # nothing is claimed now that a loss could have made wrong
                self._losses = self._losses_of_stream()
            else:
                self._on_sizes()

    def _sized(self, size: int) -> None:
        if not 1 <= size <= MOST_BLOCK_TOKENS:  # a tier that names blocks by hash alone does not say
            return
        if self._sizes_are_old:
            self._block_sizes.clear()
            self._sizes_are_old = False
        if len(self._block_sizes) < MOST_SIZES:
            self._block_sizes.add(size)
            self._on_sizes()

    def _acted(self, action: Action, _batch: EventBatch | None) -> None:
        if isinstance(action, Apply):
            self._last_event_s = time.monotonic()
            is_later = self._last_event_s > self._clear_asked_s + SETTLED_S
            if self.view.may_be_cleared and is_later and self.view.stream.exact:
                self.view.may_be_cleared = False  # this batch or one before would have told
        elif isinstance(action, Reset):
            self._sizes_are_old = True
