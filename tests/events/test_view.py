"""A view of one replica: the stream's decisions are applied to the resolver, and losses are never forgotten."""

import msgspec

from events.messages import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KnownEvent, encode_batch
from events.stream.actions import Replay
from events.stream.foreign_stream import ForeignStream
from events.view import CacheView
from tests.events.resident import copies

LONG_AFTER_S = 1000.0


def payload(*events: KnownEvent) -> bytes:
    return encode_batch(EventBatch(0.0, list(events)))


def stored(block_hash: int) -> BlockStored:
    return BlockStored([block_hash], None, [block_hash], 1, None, "GPU", None)


def child(block_hash: int, of: int) -> BlockStored:
    return BlockStored([block_hash], of, [block_hash], 1, None, "GPU", None)


def removed(block_hash: int) -> BlockRemoved:
    return BlockRemoved([block_hash], "GPU")


def synchronized() -> CacheView:
    """A view that knows batch 0."""
    view = CacheView("r")
    assert view.perform(view.stream.connected(0.0)) == [Replay(0)]
    view.perform(view.stream.replayed(0, payload(stored(1)), 0.0))
    view.perform(view.stream.replay_ended(0.0))
    assert view.inexact is None
    return view


def let_repairs_fail(view: CacheView) -> None:
    for step in range(1, 20):
        view.perform(view.stream.tick(step * LONG_AFTER_S))


def test_clear_excuses_a_loss_before_it() -> None:
    view = synchronized()
    view.perform(view.stream.live(2, payload(AllBlocksCleared()), 0.0))
    view.perform(view.stream.live(3, payload(stored(3)), 0.0))
    view.perform(view.stream.replayed(0, payload(stored(1)), 0.0))
    view.perform(view.stream.replay_ended(0.0))
    assert view.inexact is None
    assert copies(view.resolver) == {("GPU", 0): {3: 1}}


def test_clear_does_not_excuse_a_loss_after_it() -> None:
    view = synchronized()
    view.perform(view.stream.live(2, payload(AllBlocksCleared()), 0.0))
    view.perform(view.stream.live(4, payload(stored(4)), 0.0))
    let_repairs_fail(view)
    assert copies(view.resolver) == {("GPU", 0): {4: 1}}
    assert view.stream.partial is not None
    assert "3" in view.stream.partial


def test_unreadable_batch_leaves_the_view_inexact_until_the_next_clear() -> None:
    view = CacheView("r", ForeignStream())
    view.perform(view.stream.connected(0.0))
    view.perform(view.stream.replayed(0, b"\xc1", 0.0))
    view.perform(view.stream.replayed(1, payload(stored(1)), 0.0))
    view.perform(view.stream.replay_ended(0.0))
    assert view.inexact is not None
    assert "batch 0 of r" in view.inexact
    view.perform(view.stream.live(2, payload(AllBlocksCleared()), 0.0))
    assert view.inexact is None


def test_what_was_skipped_is_still_counted_after_a_restart() -> None:
    view = synchronized()
    view.perform(view.stream.live(1, b"\x93\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00\x91\x91\xa3New\xc0", 0.0))
    assert view.decoder.unknown_types == {"New": 1}
    view.perform(view.stream.live(0, payload(stored(9)), 0.0))
    assert view.stream.stats.restarts == 1
    assert view.decoder.unknown_types == {"New": 1}


def test_what_may_be_gone_is_forgotten_at_a_loss_and_its_names_are_not() -> None:
    view = synchronized()
    view.perform(view.stream.live(3, payload(child(5, of=1)), 0.0))
    let_repairs_fail(view)
    assert copies(view.resolver) == {("GPU", 0): {5: 1}}  # of a parent that is known by name alone
    assert len(view.resolver.keys()) == 1 and view.resolver.doubtful


def test_blocks_that_fill_the_pool_make_the_view_exact_again() -> None:
    view = synchronized()
    view.resolver.capacity.limit(4, 3)
    view.perform(view.stream.live(3, payload(stored(5), stored(6), stored(5)), 0.0))
    let_repairs_fail(view)
    assert view.inexact  # a copy is no proof
    view.perform(view.stream.live(4, payload(stored(7)), 99.0))
    assert not view.inexact
    assert copies(view.resolver) == {("GPU", 0): {5: 1, 6: 1, 7: 1}}


def test_a_block_found_again_is_resident_until_it_is_removed() -> None:
    view = synchronized()
    keys = sorted(view.resolver.keys())
    view.perform(view.stream.live(3, payload(stored(5)), 0.0))
    let_repairs_fail(view)
    assert view.resolver.found(keys) == keys
    assert copies(view.resolver) == {("GPU", 0): {1: 1, 5: 1}}
    view.perform(view.stream.live(4, payload(removed(1)), 99.0))
    assert copies(view.resolver) == {("GPU", 0): {5: 1}}
    assert view.resolver.found(keys) == []


def test_an_event_that_cannot_be_read_may_have_removed_any_block() -> None:
    view = synchronized()
    unreadable = {"type": "BlockRemoved", "block_hashes": "none"}
    view.perform(view.stream.live(1, msgspec.msgpack.encode([0.0, [unreadable], None]), 0.0))
    assert view.inexact is not None and "could not be read" in view.inexact
    assert copies(view.resolver) == {}


def test_the_size_of_a_pool_is_forgotten_at_a_restart() -> None:
    view = synchronized()
    view.resolver.capacity.limit(4, 3)
    view.perform(view.stream.live(0, payload(stored(9)), 0.0))  # another process, perhaps with a larger pool
    view.perform(view.stream.replayed(5, payload(stored(5), stored(6), stored(7)), 0.0))
    view.perform(view.stream.replay_ended(0.0))
    assert view.inexact is not None


def test_a_block_that_may_be_gone_does_not_prove_a_full_pool() -> None:
    view = synchronized()
    view.resolver.capacity.limit(4, 3)
    view.perform(view.stream.live(3, payload(stored(5), stored(6)), 0.0))
    let_repairs_fail(view)
    view.resolver.pools[("GPU", 0)].spent.add(5)
    view.perform(view.stream.live(4, payload(stored(7)), 99.0))
    assert view.inexact is not None
