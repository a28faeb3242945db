"""A view of one replica: the stream's decisions are applied to the resolver, and losses are never forgotten."""

from events.actions import Replay
from events.foreign_stream import ForeignStream
from events.messages import AllBlocksCleared, BlockStored, EventBatch, KnownEvent, encode_batch
from events.view import CacheView
from tests.events.resident import copies

LONG_AFTER_S = 1000.0


def payload(*events: KnownEvent) -> bytes:
    return encode_batch(EventBatch(0.0, list(events)))


def stored(block_hash: int) -> BlockStored:
    return BlockStored([block_hash], None, [block_hash], 1, None, "GPU", None)


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
