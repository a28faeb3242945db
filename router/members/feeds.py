"""The replicas' event streams, applied to the index; a FeedState describes each stream."""

import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import msgspec

from events.native import Status
from events.source import Source
from events.subscriber import Subscriber
from router.members.feed import Moment, ReplicaFeed, Traffic
from router.placement.index import PrefixIndex
from router.responses import FeedState

STOOD_STILL = "the router stood still: events of that time have not been read"
RESYNC = "the replica's reported cached tokens differ from its events"


@dataclass(eq=False)
class Feeds:
    """All feeds and their subscriber; create and use it on the thread of the event loop.

    `_on_status` may add and remove replicas, the one it was called for included. `_on_sizes` gets the name of a replica
    whose blocks turn out to have another size; it is called while a batch is being applied.
    """

    _index: PrefixIndex
    _on_status: Callable[[str, Status], None]
    _on_sizes: Callable[[str], None] = lambda _: None
    _clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._subscriber = Subscriber(self._clock)
        self._feeds: dict[str, ReplicaFeed] = {}
        self._finding: set[str] = set()  # replicas whose reused blocks are to be taken

    def follow(self, name: str, slot: int, source: Source) -> None:
        """Follow a replica's events; raise ValueError if the name is taken or an address cannot be followed."""
        source = msgspec.structs.replace(source, name=name)
        feed = ReplicaFeed(self._index, slot, source, on_sizes=lambda: self._on_sizes(name), clock=self._clock)

        def heard(status: Status) -> None:
            if not feed.left:
                self._on_status(name, status)

        self._subscriber.add(feed.source, feed.view, on_status=heard)
        self._feeds[name] = feed

    def leave(self, name: str) -> None:
        """Remove a feed and its keys from the index, so that its slot may be dropped; without a feed, do nothing."""
        if (feed := self._feeds.pop(name, None)) is not None:
            self._subscriber.remove(name)
            feed.leave()

    def state(self, name: str) -> FeedState | None:
        """The state of a replica's stream; None if its events are not followed."""
        return feed.state(self._clock()) if (feed := self._feeds.get(name)) else None

    def event_age_s(self, name: str) -> float:
        """Seconds since the replica's last event; infinite if there was none."""
        feed = self._feeds.get(name)
        last_s = None if feed is None else feed.last_event_s
        return math.inf if last_s is None else self._clock() - last_s

    def block_sizes(self, name: str) -> tuple[int, ...] | None:
        """The block sizes that a replica's events have shown; None if they are not followed."""
        return feed.block_sizes if (feed := self._feeds.get(name)) else None

    def is_unreached(self, name: str) -> bool:
        """Return True if a replica's events are followed, and were never reached though there was time."""
        return (feed := self._feeds.get(name)) is not None and feed.is_unreached(self._clock())

    def traffic(self, name: str) -> Traffic | None:
        return feed.traffic() if (feed := self._feeds.get(name)) else None

    def known(self, name: str) -> tuple[int, str | None] | None:
        """The last batch applied, and the reason if the state is inexact; None if the replica is not followed."""
        feed = self._feeds.get(name)
        if feed is None:
            return None
        reason = STOOD_STILL if self._subscriber.stands_still else feed.view.inexact
        return feed.view.stream.last_seq, reason

    def moment(self, name: str) -> Moment | None:
        """Return the present point in the replica's stream; None if it is not followed."""
        return feed.moment(standstill=self._subscriber.stands_still) if (feed := self._feeds.get(name)) else None

    def has_changed(self, name: str, since: Moment, keys: Collection[int], *, stored: bool) -> bool | None:
        """Return whether one of the blocks was stored, or removed, since then; None: too much has changed to tell."""
        return feed.has_changed(since, keys, stored=stored) if (feed := self._feeds.get(name)) else None

    def has_groups(self, name: str) -> bool:
        """Return whether the replica looks for hits in several groups of blocks, or in windows."""
        return bool((feed := self._feeds.get(name)) and feed.view.resolver.groups.layout)

    def is_settled(self, name: str, since_s: float) -> bool:
        """Return whether all that was published by then has come, as far as the stream can tell."""
        return not (feed := self._feeds.get(name)) or feed.is_settled(since_s)

    def found(self, name: str, since: Moment, keys: list[int], *, sure: bool) -> None:
        """Note blocks that the replica has reused for a request decided at that point. `sure`: the keys are exact."""
        if (feed := self._feeds.get(name)) and feed.found(since, keys, self._clock(), sure=sure):
            self._finding.add(name)

    def expect_clear(self, name: str) -> None:
        """Note that the replica may clear its cache now: its view is in doubt until its events show whether it has."""
        if feed := self._feeds.get(name):
            feed.expect_clear(self._clock())

    def tick(self) -> None:
        now_s, feeds = self._clock(), self._feeds
        self._finding = {name for name in self._finding if (feed := feeds.get(name)) and feed.tick(now_s)}

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
        if feed := self._feeds.get(name):
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
        now_s = self._clock()
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
