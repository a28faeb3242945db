"""Replicas that flood the router with events, or claim what cannot be."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import closing
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from events.cache.changes import Change, Cleared, Removed, Stored
from events.cache.pools import MAX_MEDIA
from events.cache.resolver import Resolver
from events.cache.slices import SLICE_BLOCKS, slices
from events.messages import AllBlocksCleared, BlockRemoved, BlockStored, Decoder, Event, KnownEvent, RejectedEvent
from events.source import Source
from events.stream.actions import Apply, Reset
from events.stream.native_stream import NativeStream
from events.subscriber import MAX_MESSAGE_BYTES
from events.view import CacheView
from router.members.feed import MAX_SIZES
from tests.events.test_subscriber import until
from tests.hostile.lying import SIZE, Liar, batch, keys_of, stored
from tests.hostile.pauses import pauses
from tests.router.members.test_feeds import Router, routing

MANY = 120_000
A_SLICE_S = 0.12  # a few milliseconds of work, on a machine with more to do; in one piece it is half a second and more


@pytest.fixture
async def liar() -> AsyncIterator[Liar]:
    with zmq.Context() as context, closing(Liar(context)) as liar:
        yield liar


async def exact(router: Router, liar: Liar, *payloads: bytes) -> int:
    """The slot of the replica, once the router has its whole cache."""
    slot = router.follow("r", liar.source)
    await liar.answer_snapshot(*payloads)
    await router.exact("r")
    return slot


# ---- long batches


async def test_a_batch_of_very_many_blocks_leaves_others_their_turn(liar: Liar) -> None:
    keys = keys_of(MANY)
    async with routing() as router:
        slot = await exact(router, liar)
        async with pauses() as found:
            liar.publish(batch(stored(keys)))
            liar.publish(batch(BlockRemoved(keys[1:], "GPU")))
            liar.publish(batch(stored(keys[1:3], keys[0], tokens=[])))
            await router.exact("r", 2)
        assert router.index.blocks(slot) == {"GPU": 3}
        assert found.longest_s < A_SLICE_S


async def test_the_cache_of_a_replica_that_restarts_is_forgotten_in_slices(liar: Liar) -> None:
    async with routing() as router:
        slot = await exact(router, liar, batch(stored(keys_of(MANY))))
        assert router.index.blocks(slot) == {"GPU": MANY}
        async with pauses() as found:
            liar.publish(batch(AllBlocksCleared()))
            await router.exact("r", 0)
        assert router.index.blocks(slot) == {}
        assert found.longest_s < A_SLICE_S


async def test_a_snapshot_of_very_many_blocks_leaves_others_their_turn(liar: Liar) -> None:
    async with routing() as router:
        slot = router.follow("r", liar.source)
        keys = keys_of(MANY)
        async with pauses() as found:
            await liar.answer_snapshot(
                batch(stored(keys[: MANY // 2])), batch(stored(keys[MANY // 2 :], keys[MANY // 2 - 1], []))
            )
            await router.exact("r")
        assert router.index.blocks(slot) == {"GPU": MANY}
        assert found.longest_s < A_SLICE_S


async def test_while_a_long_batch_is_applied_the_index_says_so_and_heartbeats_are_heard(liar: Liar) -> None:
    async with routing() as router:
        await exact(router, liar)
        before = len(router.statuses)
        liar.publish(batch(stored(keys_of(MANY))))
        await until(lambda: router.state("r").reason == "a long batch is being applied")
        state = router.state("r")
        assert (state.exact, state.partial) == (False, False)
        liar.say()  # the digest of no moment
        await until(lambda: len(router.statuses) > before)
        await router.exact("r", 0)
        assert router.state("r").digest_mismatches == 0


async def test_a_resync_that_is_asked_for_within_a_long_batch_follows_it(liar: Liar) -> None:
    async with routing() as router:
        slot = await exact(router, liar)
        liar.publish(batch(stored(keys_of(MANY))))
        await until(lambda: router.state("r").reason == "a long batch is being applied")
        router.of["r"].resync()
        await liar.answer_snapshot(batch(stored(keys_of(2))))
        await until(lambda: router.index.blocks(slot) == {"GPU": 2})
        await router.exact("r")


async def test_a_replica_that_leaves_within_a_long_batch_leaves_nothing_behind(liar: Liar) -> None:
    async with routing() as router:
        slot = await exact(router, liar)
        liar.publish(batch(stored(keys_of(MANY))))
        await until(lambda: bool(router.index.blocks(slot)))
        router.of["r"].leave()
        router.index.drop(slot)
        router.index.check()
        assert router.index.bytes_used() < 10_000_000 and router.matched() == {}


async def test_what_comes_within_a_long_batch_is_bounded_and_a_gap_where_it_is_too_much(
    liar: Liar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("events.subscriber.MAX_WAITING_BYTES", 10_000)
    async with routing() as router:
        slot = await exact(router, liar)
        keys = keys_of(MANY)
        payloads = [batch(stored(keys)), *(batch(stored([number], 1, [0] * 1000)) for number in range(50))]
        for payload in payloads:
            liar.publish(payload)
        feed = router.feeds._subscriber._sockets["r"]
        await until(lambda: feed._view.busy)
        while feed._view.busy or feed._waiting:
            assert feed._waiting_bytes <= 10_000
            await asyncio.sleep(0)
        liar.publish(batch(stored([77], 1, [])))
        await liar.answer_replay(*enumerate(payloads))
        await router.exact("r", 51)
        assert router.state("r").gaps >= 1
        assert router.index.blocks(slot) == {"GPU": MANY + 51}


@pytest.mark.parametrize("native", [True, False], ids=["snapshot", "replay"])
async def test_an_answer_longer_than_what_may_wait_is_read_whole(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("events.subscriber.MAX_WAITING_BYTES", 200_000)
    monkeypatch.setattr("events.subscriber.MAX_WAITING_ANSWER_BYTES", 100_000, raising=False)
    batches = [batch(*(stored([10**6 * number + k], 1, []) for k in range(3000))) for number in range(12)]
    with zmq.Context() as context, closing(Liar(context, native=native)) as liar:
        async with routing() as router:
            router.follow("r", liar.source)
            answering = asyncio.create_task(liar.keep_answering(batches))
            feed = router.feeds._subscriber._sockets["r"]
            longest = max(map(len, batches)) + 20

            def followed() -> bool:
                assert feed._waiting_bytes <= 100_000 + longest
                return router.state("r").exact and router.state("r").seq == (-1 if native else 11)

            await until(followed)
            answering.cancel()
            assert feed._view.resolver.resident_blocks() == 36_000
            assert router.state("r").lost_batches == 0


blocks = st.integers(0, 60)
removed = st.lists(blocks, max_size=40).map(lambda hashes: BlockRemoved(list(hashes), "GPU"))


@st.composite
def stores(draw: st.DrawFn) -> BlockStored:
    first, count = draw(blocks), draw(st.integers(0, 40))
    hashes = [(first + place) % 60 + 1 for place in range(count)]
    parent = draw(st.none() | blocks)
    paired = draw(st.sampled_from([True, True, True, False]))
    tokens = [block_hash for block_hash in hashes for _ in range(SIZE)] if paired else draw(st.sampled_from([[], [1]]))
    medium = draw(st.sampled_from(["GPU", "CPU"]))
    extras = draw(st.sampled_from([None, [None] * count, [["salt"], *[None] * (count - 1)] if count else None]))
    return stored(hashes, parent, tokens, medium=medium, extra_keys=extras)


@given(st.lists(st.one_of(stores(), removed, st.just(AllBlocksCleared())), max_size=12), st.integers(1, 9))
def test_slices_do_what_the_whole_does(events: list[Event], size: int) -> None:
    whole, sliced = Resolver("m"), Resolver("m")
    told = keys_after(whole.apply(events))
    parts = list(slices(events, size))
    also = keys_after([change for part in parts for change in sliced.apply(part)])
    assert all(sum(len(getattr(one, "block_hashes", ())) for one in part) <= 2 * size for part in parts)
    whole.check()
    sliced.check()
    if whole.inexact is not None:  # one hash for two blocks: which of them is meant nobody knows
        assert sliced.inexact is not None
        return
    assert {name: (pool.held, pool.named.keys()) for name, pool in whole.pools.items()} == {
        name: (pool.held, pool.named.keys()) for name, pool in sliced.pools.items()
    }
    assert also == told == {medium: keys for medium in ("GPU", "CPU") if (keys := whole.keys(medium))}


def keys_after(changes: list[Change]) -> dict[str, set[int]]:
    held: dict[str, set[int]] = {}
    for change in changes:
        if isinstance(change, Cleared):
            held.clear()
        elif isinstance(change, Removed):
            held[change.medium] -= set(change.keys)
        elif isinstance(change, Stored):
            held.setdefault(change.medium, set()).update(change.keys)
    return {medium: keys for medium, keys in held.items() if keys}


@pytest.mark.parametrize("payload_bytes", [10, 300_000], ids=["short", "long"])
def test_a_sliced_view_comes_to_the_same_as_a_whole_one(payload_bytes: int) -> None:
    keys = keys_of(3 * SLICE_BLOCKS)
    padding = [1] * payload_bytes
    events: list[KnownEvent] = [
        stored(keys),
        BlockRemoved(keys[:100], "GPU"),
        stored([], tokens=padding),
        AllBlocksCleared(),
        stored(keys[:5]),
    ]
    views = [
        CacheView("v", NativeStream(), Resolver("m", native=True), skim=True, sliced=sliced) for sliced in (False, True)
    ]
    for view in views:
        view.perform([Reset("snapshot"), Apply(-1, batch(*events[:3])), Apply(-1, batch(*events))])
        while view.busy:
            view.go_on()
        view.resolver.check()
    assert views[0].resolver.digest() == views[1].resolver.digest()
    assert views[1].resolver.keys() == set(keys[:5])
    assert views[1].resolver.inexact is None


def test_a_native_replica_is_verified_by_the_first_slice_of_its_first_chain() -> None:
    view = CacheView("v", NativeStream(), Resolver("m", native=True), skim=True, sliced=True)
    keys = keys_of(2 * SLICE_BLOCKS)
    keys[7] ^= 1
    view.perform([Apply(-1, batch(stored(keys)))])
    while view.busy:
        view.go_on()
    assert "not block keys" in (view.inexact or "")
    assert not view.resolver.keys()


# ---- long frames


async def test_a_frame_that_is_too_long_costs_a_gap_and_the_stream_continues(
    liar: Liar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("events.sockets.plain_link.RECONNECT_S", 0.1)
    async with routing() as router:
        slot = await exact(router, liar)
        await liar.subscribed()
        liar.publish(bytes(MAX_MESSAGE_BYTES + 1))
        await until(lambda: not router.state("r").connected)
        await liar.subscribed()
        await liar.answer_snapshot(batch(stored(keys_of(2))))
        await router.exact("r", 0)
        liar.publish(batch(stored(keys_of(3)[2:], keys_of(3)[1], tokens=[])))
        await router.exact("r", 1)
        assert router.index.blocks(slot) == {"GPU": 3}
        assert router.state("r").reconnects == 1


async def test_a_too_long_status_silences_no_replica_for_good(liar: Liar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("events.sockets.plain_link.RECONNECT_S", 0.1)
    async with routing() as router:
        await exact(router, liar)
        await until(lambda: liar.say() or len(router.statuses) > 0)
        liar.status.send_multipart([b"", bytes(MAX_MESSAGE_BYTES + 1)])
        heard = len(router.statuses)

        async def speaks() -> None:
            while len(router.statuses) <= heard + 20:
                liar.say()
                await asyncio.sleep(0.01)

        async with asyncio.timeout(10):
            await speaks()


@pytest.mark.parametrize(
    "nested",
    [{"extra_keys": [[]] * 2_000_000}, {"mm_keys": [[]] * 2_000_000}, {"metadata": {"a": [[]] * 2_000_000}}],
    ids=lambda nested: next(iter(nested)),
)
def test_lists_of_lists_are_refused_before_they_are_made(nested: dict[str, Any]) -> None:
    event = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [1] * SIZE}
    fields = {"block_size": SIZE, "lora_id": None, "medium": "GPU", "lora_name": None, **nested}
    payload = msgspec.msgpack.encode([0.0, [event | fields], 0])
    started_s = time.thread_time()
    events = list(Decoder().events(payload))
    assert time.thread_time() - started_s < A_SLICE_S
    assert isinstance(events[0], RejectedEvent)


def test_a_long_batch_is_read_as_a_short_one_is() -> None:
    events: list[KnownEvent] = [
        stored(keys_of(9), extra_keys=[["salt"], *[None] * 8], cache_salt="s"),
        stored([5], tokens=[(1, 2)] * SIZE),  # type: ignore[list-item]
        BlockRemoved([1, b"\x01" * 32], "CPU"),
        AllBlocksCleared(),
    ]
    short = batch(*events)
    long = batch(*events, *(BlockRemoved([number] * 1000, "GPU") for number in range(300)))
    assert list(Decoder().events(long))[:4] == Decoder().decode(short).events


def test_a_batch_of_too_many_events_is_no_batch() -> None:
    payload = msgspec.msgpack.encode([0.0, [[]] * 300_000, 0])
    view = CacheView("v", sliced=True, resolver=Resolver("m"))
    view.perform([Apply(0, payload)])
    assert "262,144 events" in (view.inexact or "")


# ---- snapshots


@pytest.mark.parametrize("batches", [-1, 2**40, 2**64 - 1])
async def test_an_endless_snapshot_is_refused(liar: Liar, batches: int) -> None:
    async with routing() as router:
        router.follow("r", liar.source)
        await liar.answer_snapshot(batches=batches)
        await liar.answer_snapshot(batch(stored(keys_of(2))))  # it is asked for again
        await router.exact("r")


async def test_a_snapshot_that_does_not_end_takes_bounded_memory(liar: Liar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("events.view.MAX_SNAPSHOT_BYTES", 1_000_000)
    async with routing() as router:
        router.follow("r", liar.source)
        feed = router.of["r"].view
        await liar.answer_snapshot(*[bytes(100_000)] * 30, batches=60_000)
        await until(lambda: feed._strange > 0)
        assert feed._snapshot_bytes <= 1_100_000
        await liar.answer_snapshot(batch(stored(keys_of(2))))
        await router.exact("r")


async def test_messages_that_are_none_do_not_fill_the_log(liar: Liar, caplog: pytest.LogCaptureFixture) -> None:
    async with routing() as router:
        await exact(router, liar)
        feed = router.of["r"].view
        with caplog.at_level(logging.WARNING):
            for _ in range(200):
                liar.events.send_multipart([b"", b"?"])
            await until(lambda: feed._strange >= 200)
        assert caplog.text.count("ignored") == 1


# ---- more than can be


async def test_a_replica_that_claims_more_than_its_pool_holds_is_inexact_and_bounded(liar: Liar) -> None:
    keys = keys_of(5000)
    async with routing() as router:
        slot = await exact(router, liar)
        router.of["r"].limit(1000)
        liar.publish(batch(stored(keys[:1000])))
        await router.exact("r", 0)
        for first in range(1000, 5000, 100):
            liar.publish(batch(stored(keys[first : first + 100], keys[first - 1], tokens=[])))
        await until(lambda: router.state("r").seq == 40)
        state = router.state("r")
        assert state.overclaim == state.reason == "it claims to hold more than the 1,000 blocks that its pool has"
        assert router.index.blocks(slot)["GPU"] <= 1114
        liar.publish(batch(AllBlocksCleared(), stored(keys[:1])))
        await router.exact("r", 41)
        assert router.state("r").overclaim is None


async def test_lost_removals_are_no_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    """An honest engine without a replay socket, with a lost batch."""
    monkeypatch.setattr("router.members.feed.READ_ANEW_PAUSE_S", 0.0)
    with zmq.Context() as context, closing(Liar(context, native=False)) as liar:
        async with routing() as router:
            router.follow("r", msgspec.structs.replace(liar.source, replay=None))
            await liar.subscribed()
            router.of["r"].limit(1000)

            async def store(first: int, count: int, *before: KnownEvent) -> None:
                news = [
                    stored([number], None, [number % 997, number // 997, 5, 7])
                    for number in range(first, first + count)
                ]
                liar.publish(batch(*before, *news))
                await until(lambda: router.state("r").seq == liar.seq)

            await store(0, 1000)
            assert not router.of["r"].overclaims()
            liar.seq += 1  # the removal of the first 200
            await store(1000, 200)
            assert router.of["r"].overclaims() is None, "what may be gone is not claimed any more"
            resolver = router.of["r"].view.resolver
            for first in range(200, 3200, 100):
                await store(first + 1000, 100, BlockRemoved(list(range(first, first + 100)), "GPU"))
                assert not router.of["r"].overclaims()
            assert resolver.capacity.overclaim is None and resolver.resident_blocks() == 1000
            await store(10_000, 200)  # without a loss
            assert router.of["r"].overclaims() is True
            liar.seq += 1
            await store(20_000, 200)
            assert not router.of["r"].overclaims()


async def test_keys_that_are_outgrown_again_and_again_are_not_read_anew_each_time() -> None:
    """Each read takes the engine's whole replay; its groups cannot have other blocks for ever."""
    with zmq.Context() as context, closing(Liar(context, native=False)) as liar:
        async with routing() as router:
            router.follow("r", msgspec.structs.replace(liar.source, replay=None))
            await liar.subscribed()
            outgrown = []
            for number, size in enumerate((8, 4, 2)):
                for group, tokens in ((number - 1, 2 * size), (number, size)):
                    group_of = {"group_idx": group, "block_size": tokens, "kv_cache_spec_kind": "full_attention"}
                    if group >= 0:
                        liar.publish(batch(stored([100 * number + group], None, [1 + number] * tokens, **group_of)))
                await until(lambda: router.state("r").seq == liar.seq)
                router.of["r"].overclaims()
                outgrown.append(router.of["r"].view.resolver.outgrown is not None)
            assert outgrown == [False, False, True], "the first time it is read anew, and then not for a while"


async def test_a_batch_that_claims_too_much_is_no_loss(liar: Liar) -> None:
    async with routing() as router:
        router.follow("r", Source("?", liar.source.events, model="m"))
        await liar.subscribed()
        router.of["r"].limit(100)
        found = []
        for number in range(3):
            liar.seq += 1
            liar.publish(batch(*(stored([1000 * number + k], None, [number, k, 0, 0]) for k in range(300))))
            await until(lambda: router.state("r").seq == liar.seq)
            found.append(router.of["r"].overclaims())
        assert found == [True, True, True]  # each batch alone; what was known before a loss is forgotten


async def test_a_pool_that_turns_out_larger_is_read_again(liar: Liar) -> None:
    async with routing() as router:
        slot = await exact(router, liar, batch(stored(keys_of(500))))
        router.of["r"].limit(100)
        assert router.state("r").overclaim is not None
        router.of["r"].limit(1000)
        await liar.answer_snapshot(batch(stored(keys_of(500))))
        await router.exact("r")
        assert router.index.blocks(slot) == {"GPU": 500}


@pytest.mark.parametrize(("pool", "medium"), [(None, "GPU"), (5000, "GPU"), (2**31, "GPU"), (100, "CPU")])
@pytest.mark.parametrize("at_once", [10, 2000])
def test_a_pool_larger_than_what_is_kept_or_a_lower_medium_is_no_claim_and_bounded(
    pool: int | None, medium: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("events.cache.pools.MAX_BLOCKS", 1000)
    resolver = Resolver("m", native=True)
    resolver.capacity.limit(pool)
    for first in range(0, 4000, at_once):
        resolver.apply([stored(list(range(first, first + at_once)), 1, [], medium=medium)])
    assert resolver.resident_blocks() == 1000 or at_once > 1000
    assert resolver.resident_blocks() <= 1000
    assert resolver.capacity.overclaim is None
    assert "the most that is kept" in (resolver.inexact or "")


def test_copies_of_what_it_holds_are_no_claims() -> None:
    resolver = Resolver("m", native=True)
    resolver.capacity.limit(100)
    for _ in range(50):
        resolver.apply([stored(keys_of(100))])
    assert resolver.inexact is None
    assert resolver.resident_blocks() == 100


@pytest.mark.parametrize("name", ["medium", "group_idx"])
def test_media_and_groups_are_few(name: str) -> None:
    resolver = Resolver("m", native=True)
    for number in range(1000):
        value: Any = f"tier {number}" if name == "medium" else number
        resolver.apply([stored([number], 1, [], **{name: value})])
    assert len(resolver.pools) <= (MAX_MEDIA if name == "medium" else 64)
    assert "media" in (resolver.inexact or "")
    resolver.apply([stored([1], 1, [], medium="x" * 100_000)])
    assert all(len(medium) <= 64 for medium, _ in resolver.pools)


async def test_block_sizes_are_few(liar: Liar) -> None:
    async with routing() as router:
        await exact(router, liar)
        for size in [-1, 0, 2**40, *range(1, 100)]:
            liar.publish(batch(stored([size % 2**32], 1, [], block_size=size)))
        await until(lambda: router.state("r").seq == 101)
        sizes = router.state("r").block_sizes
        assert len(sizes) <= MAX_SIZES
        assert max(sizes) < 100 and min(sizes) > 0


def test_orphans_weigh_what_their_tokens_do() -> None:
    resolver = Resolver("m", orphan_limit=1000)
    for number in range(100):
        resolver.apply([stored([2 * number], 2 * number + 10**6, [1] * 8000, block_size=8000)])
    assert resolver.orphan_blocks <= 1000
    kept = sum(len(event.token_ids) for events in resolver._orphans.values() for event in events)
    assert kept <= 16_000
    resolver.check()


# ---- forged hashes


def forged(*events: Event) -> Resolver:
    resolver = Resolver("m")
    resolver.apply(events)
    resolver.check()
    return resolver


def test_blocks_that_are_their_own_ancestors_get_no_key_and_are_walked_once() -> None:
    assert forged(stored([7], 7, [1] * SIZE)).keys() == set()
    cycle = stored([7], 8, [1] * SIZE), stored([8], 7, [2] * SIZE)
    resolver = forged(*cycle)
    assert resolver.keys() == set() and resolver.orphan_blocks == 2
    assert forged(*cycle, stored([7], None, [3] * SIZE)).orphan_blocks <= 2


# ---- statuses


@pytest.mark.parametrize(
    "load",
    [
        {"running": -1},
        {"waiting": 2**60},
        {"queued_prefill_tokens": -(10**12)},
        {"free_blocks": 2**63},
        {"prefill_tokens_per_s": float("nan")},
        {"prefill_tokens_per_s": float("inf")},
        {"prefill_tokens_per_s": -1.0},
        {"prefill_tokens_per_s": 1e300},
    ],
    ids=str,
)
async def test_a_status_with_figures_that_cannot_be_is_not_heard(liar: Liar, load: dict[str, Any]) -> None:
    async with routing() as router:
        await exact(router, liar)
        raw = {"incarnation": 1, "seq": -1, "ts": 0.0, "digest_blocks": 0, "digest_xor": 0, "load": load}
        liar.status.send_multipart([b"", msgspec.msgpack.encode(raw)])
        feed = router.of["r"].view
        await until(lambda: feed._strange == 1 or bool(router.statuses))
        assert not router.statuses
