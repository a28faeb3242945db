"""Streams of real publishers over real sockets, into the index."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from events.blocks import block_keys, root_key
from events.cache.changes import RecentChanges
from events.messages import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch, KnownEvent, encode_batch
from events.native import Load, Status
from events.publisher import Publisher, PublisherConfig
from events.source import Source
from events.stream.actions import Apply
from router.members.feed import SETTLED_S, Feeds, Moment, ReplicaFeed
from router.placement.index import PrefixIndex
from router.responses import FeedState

ANY = "tcp://127.0.0.1:0"
SIZE = 4
PROMPT = [number for number in range(10) for _ in range(SIZE)]
KEYS = block_keys(PROMPT, SIZE, root_key("m", None, None, SIZE))


def config(**changed: Any) -> PublisherConfig:
    return PublisherConfig(**{"events": ANY, "replay": ANY, "status": ANY, "snapshot": ANY, "model": "m", **changed})


def chain(last: int, first: int = 0, *, native: bool = True, medium: str = "GPU") -> BlockStored:
    """Blocks of the prompt; a foreign engine has hashes of its own."""
    hashes = [key if native else key // 2 for key in KEYS]
    parent = hashes[first - 1] if first else None
    return BlockStored(list(hashes[first:last]), parent, PROMPT[first * SIZE : last * SIZE], SIZE, None, medium, None)


def native(publisher: Publisher) -> Source:
    ends = publisher.endpoints
    return Source("?", ends.events, ends.replay, ends.status, ends.snapshot)


def foreign(publisher: Publisher, *, replay: bool = True) -> Source:
    ends = publisher.endpoints
    return Source("?", ends.events, ends.replay if replay else None, model="m")


class Router:
    """An index and its feeds."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.statuses: list[tuple[str, Status]] = []
        self.on_status: Callable[[str, Status], None] = lambda name, status: self.statuses.append((name, status))
        self.of: dict[str, ReplicaFeed] = {}
        self.feeds = Feeds(self.index, lambda name, status: self.on_status(name, status))

    def follow(self, name: str, source: Source) -> int:
        slot = self.index.add()
        self.of[name] = self.feeds.follow(name, slot, source)
        return slot

    def state(self, name: str) -> FeedState:
        return self.of[name].state()

    def matched(self) -> dict[int, int]:
        self.index.check()
        return self.index.match(KEYS, 0b1111).gpu

    async def exact(self, name: str, seq: int = -1) -> None:
        await until(lambda: self.state(name).exact and self.state(name).seq >= seq)


@asynccontextmanager
async def routing() -> AsyncIterator[Router]:
    router = Router()
    try:
        yield router
    finally:
        router.feeds.close()


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)


async def reporting(publisher: Publisher, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        publisher.report(Load(running=5))
        await asyncio.sleep(0.005)


async def test_native_and_foreign_replicas_fill_one_index() -> None:
    with Publisher(config()) as one, Publisher(config()) as other:
        one.publish([chain(6)])
        other.publish([chain(3, native=False)])
        async with routing() as router:
            slots = router.follow("one", native(one)), router.follow("other", foreign(other))
            await router.exact("one")
            await router.exact("other")
            assert router.matched() == {slots[0]: 6, slots[1]: 3}
            one.publish([BlockRemoved([KEYS[4]], "GPU"), chain(8, 4, medium="CPU")])
            other.publish([AllBlocksCleared(), chain(1, native=False)])
            await router.exact("one", 1)
            await router.exact("other", 1)
            assert router.matched() == {slots[0]: 4, slots[1]: 1}
            assert router.index.match(KEYS, 0b11).lower == {slots[0]: 8, slots[1]: 1}
            assert router.index.blocks(slots[0]) == {"GPU": 5, "CPU": 4}


async def test_what_comes_of_a_stream_is_counted() -> None:
    with Publisher(config()) as one:
        async with routing() as router:
            router.follow("one", native(one))
            feed = router.of["one"]
            await router.exact("one")
            one.publish([chain(6)])
            await router.exact("one", 0)
            one.publish([BlockRemoved([KEYS[5], KEYS[4]], "GPU")])
            one.publish([chain(5, 4)])
            await router.exact("one", 2)
            await reporting(one, lambda: feed.view.stream.stats.digests_compared > 0)
            assert (feed.view.stream.stats.batches, feed.stored, feed.removed) == (3, 7, 2)


async def test_a_replica_that_leaves_takes_its_blocks_along_and_its_slot_is_used_again() -> None:
    with Publisher(config()) as one, Publisher(config()) as other:
        one.publish([chain(6)])
        other.publish([chain(3)])
        async with routing() as router:
            slot = router.follow("one", native(one))
            kept = router.follow("other", native(other))
            await router.exact("one")
            await router.exact("other")
            router.of["one"].leave()
            assert router.index.blocks(slot) == {}
            router.index.drop(slot)
            assert router.follow("again", foreign(one)) == slot
            assert router.matched() == {kept: 3}
            await router.exact("again")
            assert router.matched() == {slot: 6, kept: 3}


async def test_a_state_says_what_is_known_of_the_stream() -> None:
    with Publisher(config()) as publisher:
        publisher.publish([chain(6)])
        async with routing() as router:
            router.follow("r", native(publisher))
            early = router.state("r")
            assert (early.exact, early.partial, early.connected) == (False, False, False)
            assert early.reason == "not synchronized yet"
            await router.exact("r")
            publisher.publish([chain(8, 6)])
            await router.exact("r", 1)
            state = router.state("r")
            assert (state.exact, state.partial, state.reason, state.seq) == (True, False, None, 1)
            assert (set(state.block_sizes), state.incarnation) == ({SIZE}, publisher.incarnation)
            assert (state.gaps, state.repairs, state.restarts, state.lag_batches) == (0, 0, 0, 0)
            assert state.last_event_age_s is not None and 0 <= state.last_event_age_s < 10


async def test_a_foreign_replica_without_a_replay_socket_is_partial_from_the_start() -> None:
    with Publisher(config()) as publisher:
        publisher.publish([chain(3, native=False)])
        await until(lambda: publisher.stats.batches == 1)
        async with routing() as router:
            slot = router.follow("r", foreign(publisher, replay=False))
            await until(lambda: router.state("r").partial)
            assert router.matched() == {}
            while router.state("r").seq < 1:  # until the publisher has heard of the subscription
                publisher.publish([chain(4, native=False), BlockRemoved([KEYS[2] // 2], "GPU")])
                await asyncio.sleep(0.005)
            assert router.matched() == {slot: 2}
            assert router.state("r").partial


async def test_a_replica_may_leave_and_come_back_in_the_callback_of_its_own_status() -> None:
    with Publisher(config()) as publisher:
        publisher.publish([chain(6)])
        async with routing() as router:
            slots = [router.follow("r", native(publisher))]

            def on_status(name: str, _status: Status) -> None:
                if len(slots) < 3:
                    router.of[name].leave()
                    router.index.drop(slots[-1])
                    router.index.add()  # somebody else takes the slot
                    slots.append(router.follow(name, native(publisher)))

            router.on_status = on_status
            await reporting(publisher, lambda: len(slots) == 3)
            await router.exact("r")
            assert slots == [0, 1, 2]
            assert router.matched() == {2: 6}
            router.on_status = lambda name, _status: router.of[name].leave()
            await reporting(publisher, lambda: router.of["r"].left)
            assert router.matched() == {}


@pytest.mark.parametrize("source", [native, foreign])
async def test_resync_reads_the_whole_cache_again(source: Callable[[Publisher], Source]) -> None:
    with Publisher(config()) as publisher:
        publisher.publish([chain(6)])
        async with routing() as router:
            slot = router.follow("r", source(publisher))
            await router.exact("r")
            router.index.remove(slot, [KEYS[2]])  # damage that the stream cannot know of
            router.index.store(slot, [666], "CPU")
            publisher.publish([chain(8, 6)])
            publisher.report(Load())
            await router.exact("r", 1)
            assert router.matched() == {slot: 2}  # the control: nothing else repairs it
            router.of["r"].resync()
            assert not router.state("r").exact
            await router.exact("r", 1)
            assert router.matched() == {slot: 8}
            assert router.index.blocks(slot) == {"GPU": 8}


async def test_a_replica_that_restarts_is_known_by_its_new_cache_and_block_size() -> None:
    with Publisher(config()) as first:
        first.publish([chain(6)])
        ends = first.endpoints
        router = Router()
        slot = router.follow("r", native(first))
        await router.exact("r")
    again = config(events=ends.events, replay=ends.replay, status=ends.status, snapshot=ends.snapshot)
    try:
        await until(lambda: not router.state("r").connected)
        assert router.matched() == {slot: 6}
        with Publisher(again) as second:
            keys = block_keys([7] * 8, 8, root_key("m", None, None, 8))
            second.publish([BlockStored(list(keys), None, [7] * 8, 8, None, "GPU", None)])
            await until(lambda: router.state("r").exact and router.index.blocks(slot) == {"GPU": 1})
            assert (router.state("r").incarnation, router.matched()) == (second.incarnation, {})
            await until(lambda: router.state("r").block_sizes == (8,))
    finally:
        router.feeds.close()


async def test_what_cannot_be_followed_is_refused_and_leaves_nothing() -> None:
    async with routing() as router:
        with pytest.raises(ValueError, match=r"r: events is 'tcp://nowhere'"):
            router.follow("r", Source("?", "tcp://nowhere"))
        router.follow("r", Source("?", "tcp://127.0.0.1:1"))
        with pytest.raises(ValueError, match="'r' is already followed"):
            router.follow("r", Source("?", "tcp://127.0.0.1:1"))
        assert not router.state("r").connected


async def test_changes_since_a_moment_are_remembered() -> None:
    with Publisher(config()) as publisher:
        async with routing() as router:
            router.follow("r", native(publisher))
            publisher.publish([chain(2)])
            await router.exact("r", 0)
            before = router.of["r"].moment()
            assert before is not None and before.exact
            publisher.publish([BlockRemoved([KEYS[1]], "GPU"), chain(3, first=2)])
            await router.exact("r", 1)
            assert router.of["r"].has_changed(before, [KEYS[1]], stored=False)
            assert router.of["r"].has_changed(before, [KEYS[2]], stored=True)
            assert router.of["r"].has_changed(before, [KEYS[0]], stored=True) is False
            now = router.of["r"].moment()
            assert now is not None
            assert router.of["r"].has_changed(now, [KEYS[1]], stored=False) is False
            publisher.publish([AllBlocksCleared()])
            await router.exact("r", 2)
            assert router.of["r"].has_changed(now, [KEYS[0]], stored=False)
            assert router.of["r"].has_changed(now, [KEYS[0]], stored=True) is None


def test_more_changes_than_are_remembered_cannot_be_told() -> None:
    recent = RecentChanges()
    for number in range(3):
        recent.add(list(range(number * 2000, (number + 1) * 2000)), stored=True)
    assert recent.has_changed(0, 0, [5], stored=True) is None
    assert recent.has_changed(0, 1, [5000], stored=True)


def test_blocks_reused_after_a_loss_are_taken_when_all_events_must_have_come() -> None:
    index = PrefixIndex()
    slot = index.add()
    now_s = 100.0
    feed = ReplicaFeed(index, slot, Source("r", "tcp://127.0.0.1:1", model="m"), clock=lambda: now_s)
    stream = feed.view.stream
    feed.view.perform(stream.connected(0.0))
    feed.view.perform(stream.live(0, encode_batch(EventBatch(0.0, [chain(2, native=False)])), 0.0))
    assert index.match(KEYS, 1).gpu == {slot: 2}
    before = feed.moment()
    feed.view.perform(stream.live(5, encode_batch(EventBatch(0.0, [])), 0.0))
    assert index.match(KEYS, 1).gpu == {} and not stream.exact
    feed.found(before, KEYS[:2], sure=False)
    now_s += SETTLED_S
    feed.tick()
    assert index.match(KEYS, 1).gpu == {}, "it may have been removed in what is lost"
    feed.found(feed.moment(), KEYS[:2], sure=False)
    now_s += SETTLED_S / 2
    feed.tick()
    assert index.match(KEYS, 1).gpu == {}
    now_s += SETTLED_S
    feed.tick()
    assert index.match(KEYS, 1).gpu == {slot: 2}


class Late:
    """A feed that has joined an engine whose history is gone; its clock is the test's."""

    def __init__(self) -> None:
        self.index, self.now_s = PrefixIndex(), 100.0
        source = Source("r", "tcp://127.0.0.1:1", model="m")
        self.feed = ReplicaFeed(self.index, self.index.add(), source, clock=lambda: self.now_s)
        self.feed.view.perform(self.feed.view.stream.connected(0.0))
        self.seq = 7
        self.publish()

    def publish(self, *events: KnownEvent) -> None:
        payload = encode_batch(EventBatch(0.0, list(events)))
        self.feed.view.perform(self.feed.view.stream.live(self.seq, payload, self.now_s))
        self.seq += 1

    def answered(self, since: Moment, blocks: int, *, sure: bool = True) -> int:
        """The blocks that are claimed once a hit of so many has been taken."""
        self.feed.found(since, list(KEYS[:blocks]), sure=sure)
        self.now_s += SETTLED_S
        self.feed.tick()
        return self.claimed

    @property
    def claimed(self) -> int:
        self.index.check()
        self.feed.view.resolver.check()
        return self.index.match(KEYS, 1).gpu.get(0, 0)


def removed(first: int, end: int) -> BlockRemoved:
    return BlockRemoved([key // 2 for key in KEYS[first:end]], "GPU")


def test_after_a_late_join_hits_teach_blocks_that_no_event_has_told_of() -> None:
    late = Late()
    assert not late.feed.moment().exact
    assert late.answered(late.feed.moment(), 3) == 3
    late.publish(chain(5, 3, native=False))  # its parent is the last block of the hit, whose hash is not known
    assert late.claimed == 3
    late.publish(chain(1, native=False))  # a second copy, or a report: its hash is known now
    late.publish(removed(0, 1))
    assert late.claimed == 0 and late.index.blocks(0) == {"GPU": 2}


def test_a_removal_that_may_mean_a_block_learned_from_a_hit_ends_all_of_them() -> None:
    late = Late()
    assert late.answered(late.feed.moment(), 3) == 3
    late.publish(BlockStored([1], None, [9] * SIZE, SIZE, None, "GPU", None), BlockRemoved([1], "GPU"))
    assert late.claimed == 3, "a known block was removed"
    late.publish(BlockRemoved([77], "GPU"))
    assert late.claimed == 0 and late.index.blocks(0) == {}
    assert late.answered(late.feed.moment(), 3) == 3, "it is learned again"
    late.publish(AllBlocksCleared())
    assert late.claimed == 0


def test_a_hit_that_does_not_prove_what_is_resident_now_teaches_nothing() -> None:
    late = Late()
    before = late.feed.moment()
    late.publish(BlockRemoved([77], "GPU"))
    assert late.answered(before, 3) == 0, "an unknown block was removed since"
    late.publish(chain(2, native=False))
    before = late.feed.moment()
    late.publish(removed(1, 2))
    assert late.answered(before, 3) == 1, "one of its blocks was removed since"
    assert late.answered(late.feed.moment(), 3, sure=False) == 1, "the prompt's tokens are not known for certain"
    assert late.answered(late.feed.moment(), 3) == 3
    late.publish(grouped([1], 0, "full_attention", SIZE), grouped([1], 1, "sliding_window", SIZE))
    assert late.index.blocks(0) == {"GPU": 3}, "the blocks of the hit are of one group among several"
    assert late.answered(late.feed.moment(), 3) == late.claimed


def test_hits_teach_no_more_blocks_than_the_pool_has() -> None:
    late = Late()
    late.feed.view.resolver.capacity.limit(5, 4)
    assert late.answered(late.feed.moment(), 6) == 4
    late.publish(BlockStored([1], None, [9] * SIZE, SIZE, None, "GPU", None))
    assert late.claimed == 0 and late.index.blocks(0) == {"GPU": 1}, "one of them has made room"


def test_an_exact_view_learns_nothing_from_hits() -> None:
    index, now_s = PrefixIndex(), 0.0
    feed = ReplicaFeed(index, index.add(), Source("r", "tcp://127.0.0.1:1", model="m"), clock=lambda: now_s)
    feed.view.perform(feed.view.stream.connected(0.0))
    feed.view.perform(feed.view.stream.live(0, encode_batch(EventBatch(0.0, [chain(1, native=False)])), 0.0))
    assert feed.moment().exact
    feed.found(feed.moment(), KEYS[:3], sure=True)
    now_s += SETTLED_S
    feed.tick()
    assert index.match(KEYS, 1).gpu == {0: 1}


def test_a_cache_that_may_be_cleared_is_in_doubt_until_events_tell() -> None:
    index, now_s = PrefixIndex(), 0.0
    feed = ReplicaFeed(index, index.add(), Source("r", "tcp://127.0.0.1:1", model="m"), clock=lambda: now_s)
    stream = feed.view.stream
    feed.view.perform(stream.connected(0.0))

    def publish(seq: int, *events: KnownEvent) -> tuple[bool, int]:
        feed.view.perform(stream.live(seq, encode_batch(EventBatch(0.0, list(events))), 0.0))
        return feed.moment().exact, index.match(KEYS, 1).gpu.get(0, 0)

    assert publish(0, chain(3, native=False)) == (True, 3)
    feed.expect_clear()
    assert not feed.moment().exact and feed.state().partial
    assert publish(1) == (False, 3), "it may be of the time before"
    assert publish(2, AllBlocksCleared(), chain(1, native=False)) == (True, 1)
    feed.expect_clear()
    now_s += 2 * SETTLED_S
    assert publish(3, chain(2, 1, native=False)) == (True, 2), "it has cleared nothing"
    feed.expect_clear()
    now_s += 2 * SETTLED_S
    assert publish(5)[0] is False and feed.view.may_be_cleared, "the clear may be in the lost batch"


def grouped(hashes: list[int], group: int, kind: str, size: int) -> BlockStored:
    return BlockStored([*hashes], None, list(range(size * len(hashes))), size, None, "GPU", None, None, group, kind, 64)


def test_a_replica_with_groups_is_matched_in_their_common_unit() -> None:
    index, source = PrefixIndex(), Source("r0", "tcp://127.0.0.1:1", model="m")
    feed = ReplicaFeed(index, index.add(), source)
    events: list[Event] = [grouped([2, 4], 0, "full_attention", 32), grouped([1, 2, 3, 4], 1, "sliding_window", 16)]
    feed.view.perform([Apply(0, encode_batch(EventBatch(0.0, events)))])
    state = feed.state()
    assert (state.block_sizes, state.unknown, index.blocks(0)) == ((16,), {}, {"GPU": 6})
    keys = block_keys(range(64), 16, root_key("m", block_size=16))
    assert index.match(keys, 1, 4 * 16).gpu == {0: 4}
    assert index.match(keys, 1, 3 * 16).gpu == {0: 2}, "a hit ends where blocks of all groups do"


def test_another_block_size_is_told_within_the_batch_that_shows_it() -> None:
    index, source = PrefixIndex(), Source("r0", "tcp://127.0.0.1:1", model="m")
    told: list[tuple[int, ...]] = []
    feed = ReplicaFeed(index, index.add(), source, on_sizes=lambda: told.append(feed.state().block_sizes))
    for number, (kind, size) in enumerate([("full_attention", 32), ("full_attention", 32), ("sliding_window", 16)]):
        event = grouped([number + 1], int(kind != "full_attention"), kind, size)
        feed.view.perform([Apply(number, encode_batch(EventBatch(0.0, [event])))])
    assert told[0] == (32,) and told[-1] == (16,) and len(told) == 3  # a size, groups, and their common unit


def test_what_is_not_read_of_a_replicas_events_is_told() -> None:
    index, source = PrefixIndex(), Source("r0", "tcp://127.0.0.1:1", model="m")
    feed = ReplicaFeed(index, index.add(), source)
    feed.view.perform([Apply(0, msgspec.msgpack.encode([0.0, [{"type": "BlockInactive", "block_hashes": [1]}], 0]))])
    assert feed.state().unknown == {"BlockInactive": 1}
