"""Figures of outcomes: failures, warm-up, spans, hits, replicas."""

from typing import Any

import pytest

from lab.bench.client import Outcome
from lab.bench.figures import figures


def outcome(at_s: float = 0.0, ttft_s: float = 0.1, e2e_s: float = 1.0, **fields: Any) -> Outcome:
    usual: dict[str, Any] = {
        "prompt_tokens": 100,
        "output_tokens": 10,
        "cached_tokens": 50,
        "asked_tokens": 90,
        "status": 200,
    }
    made: dict[str, Any] = {
        "talk": f"{at_s}",
        "turn": 0,
        "is_warm_up": False,
        "intended_s": at_s,
        "sent_s": at_s + 0.001,
    }
    return Outcome(**made | {"first_s": at_s + ttft_s, "end_s": at_s + e2e_s} | usual | fields)


def failure(kind: str, at_s: float = 0.0, **fields: Any) -> Outcome:
    return outcome(at_s, **{"first_s": None, "error": kind, "detail": f"of {kind}"} | fields)


def test_rates_are_over_the_time_from_the_first_intended_one_to_the_last_end() -> None:
    found = figures([outcome(1.0), outcome(2.0, e2e_s=3.0)])
    assert found.span_s == 4.0
    assert (found.requests_per_s, found.input_tokens_per_s, found.output_tokens_per_s) == (0.5, 50, 5)


def test_warm_up_is_counted_and_left_out() -> None:
    found = figures([outcome(ttft_s=9.0, is_warm_up=True), failure("timeout", is_warm_up=True), outcome(5.0)])
    assert (found.warm_up, found.requests, found.failed, found.span_s) == (2, 1, 0, 1.0)
    assert found.ttft_s.max == pytest.approx(0.1)


def test_failures_are_counted_by_kind_with_what_was_said_first_and_have_no_latency() -> None:
    refused = failure("status 429", 1.0, status=429, end_s=9.0)
    found = figures([outcome(), failure("timeout"), refused, failure("status 429", 2.0, status=429, detail="later")])
    assert (found.requests, found.failed, found.too_many) == (4, 3, 2)
    assert found.errors == {"status 429": 2, "timeout": 1}
    assert found.examples == {"status 429": "of status 429", "timeout": "of timeout"}
    assert found.ttft_s.count == found.e2e_s.count == 1


def test_a_session_counts_from_its_arrival_to_its_last_token_if_every_turn_was_answered() -> None:
    def turn(talk: str, at_s: float, **fields: Any) -> Outcome:
        return outcome(at_s, talk=talk, session_turns=2, **fields)

    whole = [turn("a", 1.0), turn("b", 2.0, sent_away=3), turn("b", 7.0), turn("a", 4.0)]
    failed = [turn("c", 0.0), failure("status 429", 8.0, talk="c", session_turns=2, sent_away=1), turn("cut", 0.0)]
    found = figures([*whole, *failed, outcome()])
    assert (found.sessions, found.session_mean_s) == (2, 5.0)
    assert found.session_p99_s == pytest.approx(6.0, abs=0.03)
    assert (found.sent_away, found.began_when_told) == (4, 1)


def test_the_hit_rate_is_of_those_that_tell_both() -> None:
    told = [outcome(prompt_tokens=300, cached_tokens=30), outcome(cached_tokens=None), outcome(prompt_tokens=None)]
    found = figures(told)
    assert found.hit_rate == 0.1
    assert figures([outcome(cached_tokens=None)]).hit_rate is None
    assert figures([outcome(cached_tokens=None)]).cached_tokens is None


def test_each_replica_has_its_share() -> None:
    at_b = [outcome(replica="b", cached_tokens=100), outcome(replica="b"), outcome(replica="b")]
    found = figures([outcome(replica="a", cached_tokens=0), *at_b])
    assert {name: (one.requests, one.share) for name, one in found.replicas.items()} == {"a": (1, 0.25), "b": (3, 0.75)}
    assert found.replicas["b"].hit_rate == pytest.approx(2 / 3)
    assert figures([outcome()]).replicas == {}


def test_a_token_after_the_first_takes_what_the_rest_of_the_answer_takes() -> None:
    assert outcome(ttft_s=0.1, e2e_s=1.0).tpot_s == pytest.approx(0.1)
    assert outcome(output_tokens=1).tpot_s is None
    assert figures([outcome(gaps_s=[0.1, 0.3]), outcome(gaps_s=[0.2])]).itl_s.p50 == pytest.approx(0.2)
