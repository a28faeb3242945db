"""The stream state machine, one behaviour at a time."""

from collections.abc import Iterable

from events.cache.pool import Digest
from events.cache.resolver import Resolver
from events.messages import BlockStored, EventBatch, encode_batch
from events.native import Doubt
from events.stream.actions import Action, Apply, Compare, Gap, Replay, Reset, Snapshot
from events.stream.foreign_stream import ForeignStream
from events.stream.native_stream import NativeStream
from events.stream.states import StreamConfig
from events.stream.stream import Stream
from events.view import CacheView

NOTHING = Digest(0, 0)


def applied(actions: Iterable[Action]) -> list[int]:
    return [action.seq for action in actions if isinstance(action, Apply)]


def kinds(actions: Iterable[Action]) -> list[str]:
    return [type(action).__name__ for action in actions]


def payload(seq: int, run: str = "a") -> bytes:
    return f"{run}{seq}".encode()


def following(seqs: int, **config: object) -> Stream:
    """A stream that has replayed batches 0 to seqs - 1 and is exact."""
    stream = ForeignStream(StreamConfig(**config))  # type: ignore[arg-type]
    stream.connected(0.0)
    for seq in range(seqs):
        stream.replayed(seq, payload(seq), 0.0)
    stream.replay_ended(0.0)
    assert stream.exact and stream.last_seq == seqs - 1
    return stream


def native_at(seq: int) -> Stream:
    stream = NativeStream()
    assert stream.connected(0.0) == [Snapshot()]
    stream.snapshot(7, seq, [b"s"], 0.0)
    assert stream.exact and stream.last_seq == seq
    return stream


def test_a_foreign_stream_starts_with_a_replay_of_everything() -> None:
    stream = ForeignStream()
    assert stream.connected(0.0) == [Replay(0)]
    assert stream.live(2, payload(2), 0.0) == []  # waits for what comes before
    assert not stream.exact
    assert applied(stream.replayed(0, payload(0), 0.0)) == [0]
    assert applied(stream.replayed(1, payload(1), 0.0)) == [1]
    assert applied(stream.replay_ended(0.0)) == [2]
    assert stream.exact


def test_a_replay_that_starts_late_is_labelled_partial() -> None:
    stream = ForeignStream()
    stream.connected(0.0)
    actions = stream.replayed(34, payload(34), 0.0)
    assert kinds(actions) == ["Partial", "Apply"]
    stream.replay_ended(0.0)
    assert stream.partial == "joined at batch 34: what came before is not known"


def test_an_empty_replay_is_not_taken_for_an_empty_cache() -> None:
    stream = ForeignStream()
    stream.connected(0.0)
    stream.replay_ended(0.0)
    assert not stream.exact
    assert applied(stream.live(0, payload(0), 0.0)) == [0]
    assert stream.exact


def test_a_gap_is_shown_and_replayed_from_the_last_batch_known() -> None:
    stream = following(3)
    assert stream.live(5, payload(5), 1.0) == [Gap(3, 4), Replay(2)]
    assert not stream.exact
    assert stream.replayed(2, payload(2), 1.0) == []
    assert applied(stream.replayed(3, payload(3), 1.0)) == [3]
    assert applied(stream.replayed(4, payload(4), 1.0)) == [4]
    assert applied(stream.replay_ended(1.0)) == [5]
    assert stream.partial is None and stream.last_seq == 5


def test_sequence_going_back_with_new_content_is_a_restart() -> None:
    stream = following(3)
    actions = stream.live(0, payload(0, "b"), 1.0)
    assert kinds(actions) == ["Reset", "Replay"] and actions[1] == Replay(0)
    stream.replayed(0, payload(0, "b"), 1.0)
    stream.replay_ended(1.0)
    assert stream.exact and stream.last_seq == 0 and stream.stats.restarts == 1


def test_after_a_reconnect_nothing_is_applied_until_continuity_is_proved() -> None:
    stream = following(3)
    assert stream.connected(1.0) == [Replay(2)]
    assert stream.live(3, payload(3), 1.0) == []
    stream.replayed(2, payload(2), 1.0)
    assert applied(stream.replayed(3, payload(3), 1.0)) == [3]
    stream.replay_ended(1.0)
    assert stream.exact


def test_a_hole_that_was_never_published_is_not_waited_for() -> None:
    stream = following(3)
    stream.live(4, payload(4), 1.0)
    stream.replayed(2, payload(2), 1.0)
    actions = stream.replayed(4, payload(4), 1.0)
    assert kinds(actions) == ["Partial", "Apply"]
    stream.replay_ended(1.0)
    assert stream.partial == "batch 3 is lost" and stream.last_seq == 4


def test_a_replay_socket_that_does_not_answer_is_given_up() -> None:
    stream = following(3)
    stream.live(5, payload(5), 1.0)
    now = 1.0
    actions: list[Action] = []
    while not applied(actions):
        now += 0.1
        actions = stream.tick(now)
        assert now < 20
    assert kinds(actions) == ["Partial", "Partial", "Apply"] and applied(actions) == [5]
    assert applied(stream.live(6, payload(6), now)) == [6]


def test_an_idle_foreign_stream_is_probed_and_its_lost_tail_found() -> None:
    stream = following(3)
    assert stream.tick(0.5) == []
    assert stream.tick(1.1) == [Replay(2)]
    assert stream.exact  # a probe is no suspicion
    stream.replayed(2, payload(2), 1.1)
    assert applied(stream.replayed(3, payload(3), 1.1)) == [3]
    stream.replay_ended(1.1)
    assert stream.exact and stream.last_seq == 3


def test_an_unanswered_probe_is_no_longer_exact_until_something_is_heard() -> None:
    stream = following(1)
    now = 0.0
    while stream.exact:
        now += 0.1
        stream.tick(now)
        assert now < 20
    stream.live(1, payload(1), now)
    assert stream.exact


def test_held_bytes_are_bounded() -> None:
    stream = following(1, max_held_bytes=1000)
    for seq in range(5, 100):
        stream.live(seq, bytes(100), 0.0)
    assert stream.stats.dropped_waiting == 85


def test_a_status_ahead_of_the_events_shows_a_lost_tail() -> None:
    stream = native_at(3)
    assert stream.status(7, 5, NOTHING, 1.0) == []  # the events may still be on their way
    assert not stream.exact
    assert stream.tick(1.1) == [Gap(4, 5), Replay(3)]


def test_a_status_overtaken_by_its_events_is_no_gap() -> None:
    stream = native_at(3)
    stream.status(7, 4, NOTHING, 1.0)
    assert stream.live(4, payload(4), 1.01) == [Apply(4, payload(4)), Compare(NOTHING)]
    assert stream.tick(1.2) == [] and stream.exact


def test_a_gap_that_a_replay_cannot_fill_leads_to_a_snapshot() -> None:
    stream = native_at(3)
    stream.live(9, payload(9), 1.0)
    assert stream.replayed(8, payload(8), 1.0) == [Snapshot()]
    actions = stream.snapshot(7, 9, [b"x", b"y"], 1.0)
    assert actions == [Reset("snapshot"), Apply(-1, b"x"), Apply(-1, b"y")]
    assert stream.exact and stream.last_seq == 9


def test_a_new_incarnation_drops_the_old_cache() -> None:
    stream = native_at(3)
    assert stream.status(8, 0, NOTHING, 1.0) == [Reset("the replica has a new incarnation"), Snapshot()]


def test_a_digest_is_compared_only_at_its_own_sequence_number() -> None:
    stream = native_at(3)
    assert stream.status(7, 2, NOTHING, 1.0) == []
    assert stream.status(7, 3, NOTHING, 1.0) == [Compare(NOTHING)]


def test_a_doubt_of_the_sender_counts_at_once_and_ends_with_what_it_was_told_of() -> None:
    stream = native_at(3)
    stream.status(7, 3, NOTHING, 1.0, Doubt("lost"))
    assert stream.doubt == "lost"
    stream.status(7, 2, NOTHING, 1.1)  # from before
    stream.status(7, 4, NOTHING, 1.1)  # what makes it sure has not come yet
    assert stream.doubt == "lost"
    stream.live(4, payload(4), 1.2)
    stream.status(7, 4, NOTHING, 1.3)
    assert stream.exact
    stream.live(6, payload(6), 1.4)
    stream.replayed(6, payload(6), 1.4)
    stream.snapshot(7, 6, [], 1.5, Doubt("lost again"))
    stream.status(7, 4, NOTHING, 1.6)
    assert stream.doubt == "lost again" and stream.settled
    stream.status(7, 6, NOTHING, 1.7)
    assert stream.exact


def test_a_full_pool_refutes_a_doubt_of_the_sender_but_no_other_one() -> None:
    view = CacheView("r", NativeStream(), Resolver(native=True))
    view.resolver.capacity.limit(3, 2)
    stream, lost = view.stream, Doubt("lost", provable=True)
    batches = [encode_batch(EventBatch(0.0, [BlockStored([key], 1, [], 1, None, "GPU", None)])) for key in (10, 11)]
    view.perform(stream.connected(0.0))
    view.perform(stream.snapshot(7, 0, batches[:1], 0.0, lost))
    view.resolver.capacity.limit(3, 2)
    assert str(view.inexact) == "lost"
    view.perform(stream.live(1, batches[1], 0.1))
    assert view.inexact is None
    for doubt in (Doubt("not connected"), Doubt("lost more", provable=True)):
        view.perform(stream.status(7, 1, Digest(2, 10 ^ 11), 0.2, doubt))
        assert str(view.inexact) == doubt.reason
        view.perform(stream.status(7, 1, Digest(2, 10 ^ 11), 0.3, lost))
        assert view.inexact is None
    view.perform(stream.status(8, 1, NOTHING, 0.4, lost))
    view.perform(stream.snapshot(8, 1, batches[:1], 0.5, lost))
    assert view.inexact == "lost", "another incarnation is not believed for what this one held"


def test_a_digest_that_differs_leads_to_a_snapshot_but_not_to_a_storm() -> None:
    view = CacheView("r", NativeStream(), Resolver(native=True))
    stream = view.stream
    view.perform(stream.connected(0.0))
    view.perform(stream.snapshot(7, 3, [], 0.0))
    snapshots = 0
    for step in range(1, 101):
        requests = view.perform(stream.status(7, 3, Digest(1, 99), step / 50))
        assert not stream.exact
        requests += view.perform(stream.tick(step / 50))
        if Snapshot() in requests:
            snapshots += 1
            view.perform(stream.snapshot(7, 3, [], step / 50))
    assert stream.stats.digest_mismatches == snapshots + 1
    assert 2 <= snapshots <= 5  # 0.2 s after the first, then twice as long each time


def test_a_native_replica_that_was_long_gone_is_asked_at_once_when_it_returns() -> None:
    stream = native_at(3)
    stream.mismatch()
    stream.disconnected()
    now = 0.0
    while now < 20.0:
        now += 0.1
        stream.tick(now)
    assert not stream.exact
    assert stream.connected(now) == [Snapshot()]


def test_a_snapshot_that_helps_ends_the_waiting() -> None:
    view = CacheView("r", NativeStream(), Resolver(native=True))
    stream, now = view.stream, 0.0
    view.perform(stream.connected(now))
    for _ in range(20):
        view.perform(stream.snapshot(7, 3, [], now))
        view.perform(stream.status(7, 3, NOTHING, now))
        assert view.inexact is None
        view.perform(stream.status(7, 3, Digest(1, 1), now))
        now += 0.5
        assert view.perform(stream.tick(now)) == [Snapshot()]


def test_a_stream_that_was_never_connected_is_not_exact_and_asks_nothing() -> None:
    stream = NativeStream()
    assert stream.tick(100.0) == []
    stream.connected(100.0)
    stream.snapshot(7, 3, [], 100.0)
    assert stream.exact and stream.stats.reconnects == 0
    stream.disconnected()
    assert stream.doubt == "not connected"


def test_a_native_stream_without_a_heartbeat_is_not_exact() -> None:
    stream = native_at(3)
    stream.status(7, 3, NOTHING, 1.0)
    stream.tick(2.9)
    assert stream.exact
    stream.tick(3.1)
    assert stream.doubt == "no status is heard"
    stream.live(4, payload(4), 3.1)  # events alone do not prove that nothing is missing
    assert stream.doubt == "no status is heard"
    stream.status(7, 4, NOTHING, 3.2)
    assert stream.exact


def test_batches_that_had_no_room_are_asked_for_though_nothing_follows() -> None:
    stream = following(1, max_held_batches=2)
    for seq in (2, 3, 4, 5):
        stream.live(seq, payload(seq), 0.0)
    for seq in (0, 1):
        stream.replayed(seq, payload(seq), 0.0)
    actions = stream.replay_ended(0.0)
    assert applied(actions) == [2, 3]
    assert actions[-2:] == [Gap(4, 5), Replay(3)]
    assert not stream.exact


def test_history_is_asked_for_again_when_the_replay_socket_answers_at_last() -> None:
    stream = ForeignStream()
    stream.connected(0.0)
    now = 0.0
    while stream.repairing:
        now += 0.1
        stream.tick(now)
    stream.live(5, payload(5), now)
    assert stream.partial == "joined at batch 5: what came before is not known"
    actions: list[Action] = []
    while not actions:
        now += 0.1
        actions = stream.tick(now)
    assert actions == [Replay(5)]
    stream.replayed(5, payload(5), now)
    assert stream.replay_ended(now) == [Reset("the replay socket answers now"), Replay(0)]
    for seq in range(6):
        stream.replayed(seq, payload(seq), now)
    stream.replay_ended(now)
    assert stream.exact and stream.last_seq == 5


def test_many_doubts_at_once_are_one_request_and_do_not_put_off_the_next() -> None:
    stream = native_at(5)
    assert kinds(stream.resync("doubted", 1.0)) == ["Partial", "Snapshot"]
    stream.live(6, payload(6), 1.0)
    for _ in range(8):
        assert kinds(stream.resync("doubted", 1.0)) == ["Partial"]
    assert kinds(stream.snapshot(7, 5, [b"s"], 1.0)) == ["Reset", "Apply", "Apply"], "batches in between are kept"
    assert (stream.exact, stream.last_seq) == (True, 6)
    for now_s, later_s in ((1.1, 1.3), (1.4, 1.8)):
        stream.resync("doubted", now_s)
        assert stream.tick(later_s) == [Snapshot()]
        stream.snapshot(7, 6, [b"s"], later_s)


def test_a_stream_that_is_doubted_while_offline_asks_when_it_is_connected() -> None:
    for stream, request in ((following(3), Replay(0)), (native_at(5), Snapshot())):
        stream.disconnected()
        assert request not in stream.resync("doubted", 1.0)
        assert stream.connected(2.0) == [request]


def test_a_stream_without_replay_or_snapshot_starts_empty_and_partial_as_it_does_after_a_reconnect() -> None:
    assert kinds(following_without_replay().connected(1.0)) == ["Partial"]
    stream = following_without_replay()
    assert (stream.resync("doubted", 1.0), stream.doubt) == ([Reset("doubted")], "doubted")
    assert applied(stream.live(1, payload(1), 1.0)) == [1]
    assert (stream.doubt, stream.settled) == ("joined at batch 1: what came before is not known", True)


def test_lag_counts_what_is_known_to_be_sent_and_not_applied() -> None:
    stream = native_at(5)
    assert stream.lag_batches == 0
    stream.status(7, 8, NOTHING, 1.0)
    assert stream.lag_batches == 3
    for seq in (6, 7, 8):
        stream.live(seq, payload(seq), 1.0)
    assert stream.lag_batches == 0


def test_without_a_connection_nothing_is_asked() -> None:
    for stream in (following(3), native_at(3)):
        stream.disconnected()
        asked = [action for step in range(1, 400) for action in stream.tick(float(step))]
        assert asked == []
        assert stream.doubt == "not connected"


def test_after_a_standstill_nothing_is_exact_until_a_replay_shows_the_tail() -> None:
    stream = following(3)
    assert stream.stood_still(10.0) == [Replay(2)]
    assert "stood still" in str(stream.doubt)
    stream.replayed(2, payload(2), 10.0)
    assert applied(stream.replayed(3, payload(3), 10.0)) == [3]  # the lost tail
    assert stream.doubt
    stream.replay_ended(10.0)
    assert not stream.doubt and stream.last_seq == 3


def test_a_replay_asked_before_a_standstill_does_not_prove_the_tail() -> None:
    stream = following(3)
    assert stream.tick(2.0) == [Replay(2)]  # an idle stream is probed
    assert stream.stood_still(5.0) == [Replay(2)]
    stream.live(5, payload(5), 5.0)  # a gap, with a repair of its own
    stream.stood_still(9.0)
    for seq in range(2, 5):
        stream.replayed(seq, payload(seq), 9.0)
    stream.replay_ended(9.0)
    assert not stream.exact
    assert stream.tick(9.1) == [Replay(5)]
    stream.replayed(5, payload(5), 9.2)
    stream.replay_ended(9.2)
    assert stream.exact


def test_without_a_replay_socket_the_next_batch_after_a_pause_ends_the_doubt() -> None:
    stream = following_without_replay()
    assert stream.stood_still(10.0) == []
    stream.live(1, payload(1), 10.01)  # it may have waited in a queue that was full
    assert not stream.exact
    stream.live(2, payload(2), 11.0)
    assert stream.exact


def following_without_replay() -> Stream:
    stream = ForeignStream(StreamConfig(can_replay=False))
    stream.connected(0.0)
    stream.live(0, payload(0), 0.0)
    assert stream.exact
    return stream


def test_only_what_was_missing_or_doubted_is_a_repair() -> None:
    stream = following(3)
    assert stream.tick(2.0) == [Replay(2)]  # an idle stream is probed
    stream.replayed(2, payload(2), 2.0)
    stream.replay_ended(2.0)
    assert (stream.stats.replays, stream.stats.repairs) == (2, 0)
    stream.live(4, payload(4), 3.0)
    assert (stream.stats.replays, stream.stats.repairs) == (3, 1)
    native = native_at(3)
    assert native.stats.repairs == 0
    native.resync("doubted", 1.0)
    assert native.stats.repairs == 1


def test_an_idle_replica_is_heard_by_its_status_or_by_a_probe() -> None:
    native = native_at(3)
    native.status(7, 3, NOTHING, 9.0)
    assert native.heard_s == 9.0
    stream = following(3)
    stream.tick(2.0)
    stream.replayed(2, payload(2), 2.5)
    assert stream.heard_s == 2.5
