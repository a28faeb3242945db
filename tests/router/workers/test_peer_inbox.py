"""Two routers tell each other what they send: each counts the other's requests like its own, whatever is lost."""

from math import inf, nan
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.placement.index import APPROXIMATE
from router.placement.load import Placed
from router.placement.outbox import (
    BETWEEN_S,
    MAX_SENT,
    OTHERS_WITHIN_S,
    RUNNING_S,
    SENT_WITHIN_S,
    Outbox,
    PeerBatch,
    PeerRequest,
)
from router.workers.peer_inbox import MAX_KEYS, MAX_PEERS, SILENT_S, Inbox
from tests.router.placement.test_placement import SIZE, Prompt, Scene

OTHER = 7
WIRE = msgspec.msgpack.Decoder(PeerBatch)


class Telling(Scene):
    """A scene whose router tells, and hears."""

    def __init__(self, number: int, **more: Any) -> None:
        super().__init__(**more)
        self.wakes: list[float] = []
        self.it.outbox = self.outbox = Outbox(number, self.wake)
        self.inbox = Inbox(self.it, {load.candidate.name: load for load in self.loads}.get, number)
        self.placed: list[Placed] = []

    def wake(self, within_s: float) -> None:
        self.wakes.append(within_s)

    def hear(self, batches: list[PeerBatch], now_s: float = 0.0) -> bool:
        return any([self.inbox.hear(WIRE.decode(msgspec.msgpack.encode(batch)), now_s, now_s) for batch in batches])  # noqa: C419

    def queued(self) -> list[float]:
        return [load.candidate.queued_tokens for load in self.loads]

    def in_flight(self) -> list[tuple[int, int]]:
        return [(load.candidate.in_flight, load.candidate.all_in_flight) for load in self.loads]

    def check(self) -> None:
        self.inbox.check()
        self.it.index.optimistic.check()
        for load in self.loads:
            load.check()


def test_what_one_router_sends_the_other_counts() -> None:
    one, other = Telling(1), Telling(2)
    load, placed = one.place(Prompt())
    slot = load.candidate.slot
    other.hear(one.outbox.take(0.0, 0.0))
    assert other.queued() == one.queued() != [0.0, 0.0]
    assert other.in_flight()[slot] == (0, 1)
    assert other.matched(Prompt()) == one.matched(Prompt()) == {slot: 160}
    one.it.begun(placed, 1.0)
    other.hear(one.outbox.take(1.0, 1.0), 1.0)
    assert other.queued() == [0.0, 0.0]
    assert other.matched(Prompt(), 1.0) == {slot: 160}
    one.it.ended(placed, 2.0)
    assert other.hear(one.outbox.take(2.0, 2.0), 2.0), "there is room"
    assert other.in_flight() == [(0, 0), (0, 0)]
    other.check()


def test_two_routers_do_not_choose_the_same_replica_at_once() -> None:
    one, other = Telling(1), Telling(2)
    first, _ = one.place(Prompt(first=1))
    other.hear(one.outbox.take(0.0, 0.0))
    second, _ = other.place(Prompt(first=1000))
    assert first.candidate.name != second.candidate.name


def test_a_limit_holds_for_all_routers_together() -> None:
    one, other = Telling(1, replicas=1, limit=1), Telling(2, replicas=1, limit=1)
    _, placed = one.place(Prompt())
    other.hear(one.outbox.take(0.0, 0.0))
    question, _ = other.it.question(Prompt(first=1000), other.slots, 0.0)
    assert other.it.decide(question, [other.loads[0].candidate]).rejection == "full"
    one.it.ended(placed, 1.0)
    assert other.hear(one.outbox.take(1.0, 1.0), 1.0)
    assert other.place(Prompt(first=1000), 1.0)


def test_blocks_of_a_request_that_never_began_count_no_longer() -> None:
    one, other = Telling(1), Telling(2)
    _, placed = one.place(Prompt())
    other.hear(one.outbox.take(0.0, 0.0))
    one.it.ended(placed, 0.1)
    other.hear(one.outbox.take(0.1, 0.1), 0.1)
    assert other.matched(Prompt()) == {}
    other.check()


def test_guesses_about_replicas_without_events_travel_too() -> None:
    one, other = Telling(1), Telling(2)
    question, _ = one.it.question(Prompt(exact=False), {APPROXIMATE: 3}, 0.0)
    decision = one.it.decide(question, [load.candidate for load in one.loads])
    assert decision.chosen is not None
    one.it.sent(decision, one.loads[decision.chosen.slot], Prompt(exact=False), APPROXIMATE, 0.0)
    other.hear(one.outbox.take(0.0, 0.0))
    assert other.it.question(Prompt(exact=False), {APPROXIMATE: 3}, 0.0)[0].matched == {decision.chosen.slot: 128}


def test_the_outbox_wakes_once_for_all_that_it_gathers() -> None:
    one = Telling(1)
    for first in range(0, 100 * MAX_SENT, 100):
        one.place(Prompt(first=first))
    one.place(Prompt(first=10**6))
    assert one.wakes == [SENT_WITHIN_S]
    batches = one.outbox.take(0.0, 0.0)
    assert [len(batch.sent) for batch in batches] == [MAX_SENT, 1]
    assert [batch.number for batch in batches] == [0, 1]
    assert one.outbox.take(0.1, 0.1) == []
    [quiet] = one.outbox.take(RUNNING_S, RUNNING_S)
    assert len(quiet.running or ()) == MAX_SENT + 1
    _, placed = one.place(Prompt(first=2 * 10**6), 1.0)
    assert one.wakes == pytest.approx([SENT_WITHIN_S, SENT_WITHIN_S])
    one.outbox.take(1.1, 1.1)
    one.it.begun(placed, 2.0)
    one.it.ended(placed, 2.0)
    one.place(Prompt(first=3 * 10**6), 2.0)
    assert one.wakes[2:] == pytest.approx([OTHERS_WITHIN_S, SENT_WITHIN_S]), "what is urgent takes the rest with it"


def test_batches_keep_apart_and_say_when_their_first_request_was_sent() -> None:
    one = Telling(1)
    one.place(Prompt(), 1.0)
    one.outbox.take(1.002, 51.002)
    one.place(Prompt(first=1000), 1.003)
    assert one.wakes == pytest.approx([SENT_WITHIN_S, BETWEEN_S - 0.001])
    one.place(Prompt(first=2000), 1.005)
    [batch] = one.outbox.take(1.009, 51.009)
    assert len(batch.sent) == 2
    assert batch.at_s == pytest.approx(51.003)
    one.place(Prompt(first=3000), 2.0)
    assert one.wakes[2:] == pytest.approx([SENT_WITHIN_S])


def test_a_peer_that_is_silent_is_forgotten() -> None:
    one, other = Telling(1), Telling(2)
    one.place(Prompt())
    other.hear(one.outbox.take(0.0, 0.0))
    assert not other.inbox.expire(SILENT_S)
    assert other.inbox.expire(SILENT_S + 0.1)
    assert (other.in_flight(), other.matched(Prompt()), other.inbox.peers) == ([(0, 0), (0, 0)], {}, {})
    other.check()


def test_a_routers_own_batches_may_come_back_to_it() -> None:
    one = Telling(1)
    load, _ = one.place(Prompt())
    one.hear(one.outbox.take(0.0, 0.0))
    assert one.in_flight()[load.candidate.slot] == (1, 1)
    assert not one.inbox.peers


def request(number: int = 0, **changed: Any) -> PeerRequest:
    known: dict[str, Any] = {
        "id": number,
        "replica": "r0",
        "uncached_tokens": 10,
        "streams": True,
        "priority_s": 0.0,
        "block_size": SIZE,
        "keys": bytes(8),
        "awaited_s": 1.0,
    }
    return PeerRequest(**(known | changed))


@pytest.mark.parametrize(
    "strange",
    [
        {"replica": "elsewhere"},
        {"priority_s": nan},
        {"priority_s": -inf},
        {"priority_s": 1e300},
        {"awaited_s": nan},
        {"awaited_s": inf},
        {"awaited_s": -1.0},
        {"keys": bytes(8 * (MAX_KEYS + 1))},
    ],
)
def test_a_strange_request_is_not_counted(strange: dict[str, Any]) -> None:
    own = Telling(1)
    own.hear([PeerBatch(OTHER, 0, 0.0, [request(1, **strange)], begun=[1, 99], ended=[1, 98])])
    assert (own.inbox.counts.ignored, own.inbox.counts.requests) == (1, 0)
    assert own.in_flight() == [(0, 0), (0, 0)]


@pytest.mark.parametrize(
    "field",
    [{"uncached_tokens": -1}, {"uncached_tokens": 2**40}, {"id": -1}, {"block_size": -16}, {"replica": "x" * 2000}],
)
def test_what_no_router_says_is_not_read(field: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        Telling(1).hear([PeerBatch(OTHER, 0, 0.0, [request(**field)])])


def test_keys_and_requests_and_peers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.workers.peer_inbox.MAX_RUNNING", 10)
    monkeypatch.setattr("router.workers.peer_inbox.MAX_KEYS", 20)
    own = Telling(1)
    own.hear([PeerBatch(OTHER, 0, 0.0, [request(number, keys=Random(number).randbytes(80)) for number in range(5)])])
    assert (own.inbox.counts.requests, own.inbox.counts.ignored) == (2, 3)
    assert len(own.it.index.optimistic) == 20
    own.hear([PeerBatch(OTHER, 1, 0.0, [request(number + 100, keys=b"") for number in range(20)])])
    assert own.in_flight()[0] == (0, 10)
    own.hear([PeerBatch(number, 0, 0.0, [request()]) for number in range(100, 100 + 2 * MAX_PEERS)])
    assert len(own.inbox.peers) == MAX_PEERS
    own.check()


# Steps of two routers: place a prompt, begin or end one of those placed, let time pass.
STEP = st.tuples(st.integers(0, 1), st.sampled_from(["place", "begin", "end", "tell", "wait"]), st.integers(0, 2**16))


@given(
    steps=st.lists(STEP, max_size=60), loss=st.sampled_from([0.0, 0.3, 0.9]), chance=st.randoms(use_true_random=False)
)
def test_routers_agree_again_whatever_was_lost(steps: list[tuple[int, str, int]], loss: float, chance: Random) -> None:
    """After two lists of running requests, nothing that has ended is counted; without a loss, everything is."""
    both, now_s = (Telling(1), Telling(2)), 0.0

    def tell(own: Telling, other: Telling, lost: float) -> None:
        other.hear([batch for batch in own.outbox.take(now_s, now_s) if chance.random() >= lost], now_s)

    for which, step, number in steps:
        own, other = both[which], both[1 - which]
        now_s += 0.01
        match step:
            case "place":
                own.placed.append(own.place(Prompt(first=number), now_s)[1])
            case "begin" if own.placed:
                own.it.begun(own.placed[number % len(own.placed)], now_s)
            case "end" if own.placed:
                own.it.ended(own.placed.pop(number % len(own.placed)), now_s)
            case "tell":
                tell(own, other, loss)
            case "wait":
                now_s += RUNNING_S
        own.check()
        other.check()
    for _ in range(2):
        now_s += RUNNING_S
        tell(both[0], both[1], 0.0)
        tell(both[1], both[0], 0.0)
    for own, other in (both, both[::-1]):
        own.check()
        for mine, its in zip(own.in_flight(), other.in_flight(), strict=True):
            theirs = mine[1] - mine[0]  # as this router knows of the other
            assert theirs <= its[0], "a request that has ended counts still"
            assert loss or theirs == its[0], "a request is not counted"
        if not loss:
            assert own.inbox.counts.corrected == own.inbox.counts.lost_batches == 0
