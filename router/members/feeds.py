"""The replicas' event streams, applied to the index; a FeedState describes each stream."""

import math
import time
from collections.abc import Callable

import msgspec
from msgspec import Struct

from events.actions import Action, Apply, Reset
from events.messages import EventBatch
from events.native import Status
from events.resolver import Change, Cleared, Removed, Resolver, Stored
from events.source import Source
from events.subscriber import Subscriber
from events.view import CacheView
from router.members.spec import MOST_BLOCK_TOKENS
from router.placement.index import PrefixIndex
from router.responses import FeedState

MOST_SIZES = 16  # block sizes of one replica
READ_ANEW_PAUSE_S = 30.0  # between two full reads of one replica after losses in its stream
RESYNC = "the replica's reported cached tokens differ from its events"


class Traffic(Struct, frozen=True):
    """Counts of one replica's stream so far."""

    batches: int
    stored: int  # blocks that got a key, as often as they came
    removed: int
    digests_compared: int


class Feeds:
    """All feeds and their subscriber; create and use it on the thread of the event loop.

    `on_status` may add and remove replicas, the one it was called for included.
    """

    def __init__(self, index: PrefixIndex, on_status: Callable[[str, Status], None]) -> None:
        self._index = index
        self._on_status = on_status
        self._subscriber = Subscriber()
        self._feeds: dict[str, ReplicaFeed] = {}

    def follow(self, name: str, slot: int, source: Source) -> None:
        """Follow a replica's events; raise ValueError if the name is taken or an address cannot be followed."""
        feed = ReplicaFeed(self._index, slot, msgspec.structs.replace(source, name=name))

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

    def traffic(self, name: str) -> Traffic | None:
        feed = self._feeds.get(name)
        return None if feed is None else feed.traffic()

    def known(self, name: str) -> tuple[int, str | None] | None:
        """The last batch applied, and the reason if the state is inexact; None if the replica is not followed."""
        feed = self._feeds.get(name)
        return None if feed is None else (feed.view.stream.last_seq, feed.view.inexact)

    def limit(self, name: str, gpu_blocks: int | None) -> None:
        """Set the number of blocks in the replica's GPU pool; if it has claimed too many, read its cache again."""
        feed = self._feeds.get(name)
        if feed is None or feed.view.resolver.gpu_blocks == gpu_blocks:
            return
        claimed = feed.view.resolver.overclaim
        feed.view.resolver.limit(gpu_blocks)
        if claimed is not None:
            self.resync(name, claimed)

    def overclaims(self, name: str) -> bool | None:
        """Return True if the replica claims more than it can hold; None: not known now.

        Lost removals look the same: after a loss, the replica's cache is read again before it is blamed.
        """
        feed = self._feeds.get(name)
        if feed is None:
            return None
        claimed = feed.view.resolver.overclaim
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

    def __init__(self, index: PrefixIndex, slot: int, source: Source, *, hashes_are_keys: bool | None = None) -> None:
        """`hashes_are_keys`: by default true for a native source."""
        self.source = source
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
        self._sizes_are_old = False  # from before the last reset; kept until something is stored
        self._last_event_s: float | None = None
        self._stored = self._removed = 0  # blocks, since ever
        self._losses = 0  # losses of the stream at the last full read for them
        self._read_anew_s = -math.inf

    def _losses_of_stream(self) -> int:
        """Count lost batches and reconnects: without a replay, events between two connections are unknown."""
        stats = self.view.stream.stats
        return 0 if self.source.native else stats.lost_batches + stats.reconnects

    def may_have_lost(self, now_s: float) -> bool:
        """True if removals may have been lost since the last full read, and the pause after it is over."""
        return self._losses_of_stream() > self._losses and now_s >= self._read_anew_s + READ_ANEW_PAUSE_S

    def reads_anew(self, now_s: float) -> None:
        self._losses, self._read_anew_s = self._losses_of_stream(), now_s

    def leave(self) -> None:
        self.left = True
        self._index.apply(self._slot, Cleared(self.view.resolver.held()))

    def state(self, now_s: float) -> FeedState:
        stream, reason = self.view.stream, self.view.inexact
        return FeedState(
            exact=reason is None,
            reason=reason,
            partial=reason is not None and stream.settled and not self.view.busy,
            connected=stream.online,
            block_sizes=tuple(sorted(self._block_sizes)),
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
            overclaim=self.view.resolver.overclaim,
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
            size = change.event.block_size
            if size not in self._block_sizes or self._sizes_are_old:
                self._sized(size)
        elif isinstance(change, Removed):
            self._removed += len(change.keys)

    def _sized(self, size: int) -> None:
        if not 1 <= size <= MOST_BLOCK_TOKENS:  # a tier that names blocks by hash alone does not say
            return
        if self._sizes_are_old:
            self._block_sizes.clear()
            self._sizes_are_old = False
        if len(self._block_sizes) < MOST_SIZES:
            self._block_sizes.add(size)

    def _acted(self, action: Action, _batch: EventBatch | None) -> None:
        if isinstance(action, Apply):
            self._last_event_s = time.monotonic()
        elif isinstance(action, Reset):
            self._sizes_are_old = True
