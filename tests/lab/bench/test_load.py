"""Loads against endpoints that answer as told: both loops, times, warm-up, limits and every kind of failure."""

import threading
from itertools import pairwise
from typing import Any

import pytest

from lab.bench.client import Outcome
from lab.bench.measure import Measured
from lab.bench.workloads import Conversation, Passage, Turn, replayed
from lab.trace.requests import Trace, TraceRequest
from tests.lab.bench.endpoints import Call, arriving, closed, endpoint, opened, singles


def outcomes(found: Measured) -> list[Outcome]:
    ran = found.ran
    return ran.outcomes


def test_closed_loop_has_never_more_in_flight_than_clients() -> None:
    def answer(call: Call) -> None:
        if call.number == 2:
            call.server.released.set()
        assert call.server.released.wait(10)  # until three are there at once
        call.answer()

    with endpoint(answer) as server:
        found = outcomes(closed(server.url, singles(12), clients=3))
    assert server.most_at_once == 3
    assert [one.error for one in found] == [None] * 12


def test_what_an_endpoint_tells_is_kept() -> None:
    with endpoint(lambda call: call.answer(tokens=4, cached=7, x_warmroute_replica="r1")) as server:
        [one] = outcomes(closed(server.url, singles(1, words=20, output_tokens=4), clients=1))
    assert (one.prompt_tokens, one.output_tokens, one.cached_tokens, one.replica) == (20, 4, 7, "r1")
    assert (one.events, len(one.gaps_s), one.asked_tokens) == (4, 3, 20)
    assert one.intended_s <= one.sent_s < (one.first_s or 0) <= one.end_s


def stalling(call: Call) -> None:
    """The first one stands in the way of all others, as a server that does one thing at a time."""
    with call.server.lock:
        if call.number == 0:
            threading.Event().wait(0.4)
    call.answer()


def test_in_open_loop_a_stall_is_in_the_latency_of_all_that_came_meanwhile() -> None:
    with endpoint(stalling) as server:
        found = sorted(outcomes(opened(server.url, singles(20), rate=50)), key=lambda one: one.intended_s)
    ttfts_s = [one.ttft_s or 0 for one in found]
    assert [round(one.intended_s, 6) for one in found] == [pytest.approx(n / 50) for n in range(20)]
    # each came 20 ms after the one before it, and waited as much less
    for number, ttft_s in enumerate(ttfts_s[:15]):
        assert ttft_s > 0.4 - number / 50 - 0.02


def test_warm_up_is_sent_first_and_not_counted() -> None:
    with endpoint() as server:
        found = outcomes(closed(server.url, singles(50), clients=1, requests=6, warm_up=4))
    assert [one.is_warm_up for one in found] == [True] * 4 + [False] * 6
    assert len(server.calls) == 10


@pytest.mark.parametrize("is_open", [True, False])
def test_after_its_time_nothing_new_is_begun_and_what_runs_may_end(is_open: bool) -> None:
    def answer(call: Call) -> None:
        call.begin()
        threading.Event().wait(0.05)
        call.token(finish_reason="stop")
        call.end()

    with endpoint(answer) as server:
        conversations = singles(10_000)
        found = (
            opened(server.url, conversations, rate=40, for_s=0.3)
            if is_open
            else closed(server.url, conversations, clients=2, for_s=0.3)
        )
    assert all(one.intended_s < 0.35 and one.error is None for one in outcomes(found))
    assert len(server.calls) == len(outcomes(found)) >= 5
    assert not found.ran.was_interrupted


def conversation(turns: int, think_s: float = 0.0) -> list[Conversation]:
    made = tuple(Turn((Passage(f"t{n}", 10),), 2, think_s if n else 0.0) for n in range(turns))
    return [Conversation("c", (Passage("system", 30),), made)]


def test_a_conversation_continues_with_the_answers_it_got() -> None:
    with endpoint() as server:
        found = outcomes(closed(server.url, conversation(3), clients=2))
    roles = [[message["role"] for message in call.body["messages"]] for call in server.calls]
    assert roles[0] == ["system", "user"]
    assert roles[2] == ["system", "user", "assistant", "user", "assistant", "user"]
    first, _, last = (call.body["messages"] for call in server.calls)
    assert last[:2] == first
    assert last[2]["content"] == " able able"
    assert {call.headers["x-session-id"] for call in server.calls} == {"c"}
    assert [one.turn for one in found] == [0, 1, 2]


def test_a_conversation_whose_turn_fails_continues_with_something_made_up() -> None:
    with endpoint(lambda call: call.refuse(500, "no") if call.number == 0 else call.answer()) as server:
        found = outcomes(closed(server.url, conversation(2), clients=1))
    assert [one.error for one in found] == ["status 500", None]
    assert len(server.calls[1].body["messages"][2]["content"].split()) == 2


def test_a_recorded_session_comes_again_when_told_and_its_turns_follow_its_answers() -> None:
    requests = [
        TraceRequest(0.0, 10, 2, (1,), "s"),
        TraceRequest(0.1, 20, 2, (1, 2), "s"),
        TraceRequest(0.0, 8, 2, (3,)),
    ]
    arrivals = list(replayed(Trace("t", 10, requests), by_session=True))

    def answer(call: Call) -> None:
        if [one.headers["x-session-id"] for one in call.server.calls].count("s") == 1 and call.headers["x-session-id"]:
            call.refuse(429, "full", retry_after="0")
        else:
            call.answer()

    def ran(**limits: Any) -> list[Outcome]:
        with endpoint(answer) as server:
            found = outcomes(arriving(server.url, arrivals, **limits))
            said = [call.body["messages"] for call in server.calls if call.headers["x-session-id"] == "s"]
        assert [len(one) for one in said] == [1] * len(said)
        assert said[-1][0]["content"].startswith(said[0][0]["content"]) and said[-1] != said[0]
        return sorted((one for one in found if one.talk == "s"), key=lambda one: one.turn)

    first, second = ran(comes_again=True)
    assert (first.error, first.sent_away, second.sent_away) == (None, 1, 0)
    assert second.intended_s == pytest.approx(first.end_s + 0.1 - (first.end_s - (first.first_s or 0)))
    assert [one.error for one in ran()] == ["status 429", None], "without that, it fails"


def test_nobody_comes_again_when_the_time_is_over() -> None:
    with endpoint(lambda call: call.refuse(429, "full", retry_after="0")) as server:
        [only] = outcomes(closed(server.url, singles(1), clients=1, comes_again=True, for_s=0.05))
    assert only.error == "status 429" and only.sent_away


# ---- failures


def cut_short(call: Call) -> None:
    call.begin()
    call.token()
    call.end()


def broken(call: Call) -> None:
    call.begin()
    call.token()
    call.drop()


def nothing_said(call: Call) -> None:
    call.begin()
    call.event({"object": "error", "message": "as old servers say it"})
    call.event(b"[DONE]")
    call.end()


def failing(call: Call) -> None:
    call.begin()
    call.token()
    call.event({"error": {"message": "the replica is lost"}})
    call.event(b"[DONE]")
    call.end()


def nonsense(call: Call) -> None:
    call.begin()
    call.event(b"{")


def silent(call: Call) -> None:
    call.begin()
    call.token()
    call.server.released.wait(10)


@pytest.mark.parametrize(
    ("answer", "kind", "detail"),
    [
        (lambda call: call.refuse(429, "queue full"), "status 429", "queue full"),
        (lambda call: call.refuse(503, "drains"), "status 503", "drains"),
        (lambda call: call.whole(b"{}"), "not a stream", "{}"),
        (lambda call: call.drop(), "no answer", "it ended the connection"),
        (broken, "broken stream", "it ended the connection"),
        (cut_short, "cut short", "without a finish_reason"),
        (nothing_said, "cut short", "without a finish_reason"),
        (failing, "error in the stream", "the replica is lost"),
        (nonsense, "unreadable event", "truncated"),
        (silent, "timeout", "not complete after 0.3 s"),
    ],
)
def test_a_failure_is_known_by_its_kind_and_the_load_continues(answer: object, kind: str, detail: str) -> None:
    def every_other(call: Call) -> None:
        if call.number % 2:
            call.answer()
        else:
            assert callable(answer)
            answer(call)

    with endpoint(every_other) as server:
        found = outcomes(closed(server.url, singles(2), clients=1, timeout_s=0.3 if answer is silent else 10.0))
    assert [one.error for one in found] == [kind, None]
    assert detail in found[0].detail
    assert found[0].ttft_s is None and found[0].e2e_s is None


def test_a_client_rests_after_a_failure() -> None:
    """Or an endpoint that is gone would be asked thousands of times a second."""
    with endpoint(lambda call: call.refuse(503, "gone")) as server:
        found = outcomes(closed(server.url, singles(3), clients=1))
    assert all(after.intended_s - before.end_s >= 0.09 for before, after in pairwise(found))


def test_an_answer_of_no_token_begins_with_its_end() -> None:
    def empty(call: Call) -> None:
        call.begin()
        call.token(text="", finish_reason="stop")
        call.end()

    with endpoint(empty) as server:
        [one] = outcomes(closed(server.url, singles(1), clients=1))
    assert (one.error, one.output_tokens, one.first_s) == (None, 0, one.end_s)


def test_a_fault_of_our_own_ends_the_run_and_is_told() -> None:
    class Unwritable(Conversation):
        """Fails where it is made a body of."""

        @property
        def system(self) -> tuple[Passage, ...]:
            raise ZeroDivisionError

    bad = Unwritable("x", (), (Turn((Passage("p", 5),), 2),))
    with endpoint() as server, pytest.raises(ZeroDivisionError):
        opened(server.url, [*singles(2), bad, *singles(2)], rate=100)
