"""Arrival times of requests, and prompts from a trace's blocks."""

import statistics
from itertools import islice, pairwise

import pytest

from lab.bench.prompts import Words
from lab.bench.workloads import TURNS, arriving, conversations, limited, replayed
from lab.trace.requests import Trace, TraceRequest, sped_up

COUNT = 4000


def times(workload: str = "chatbot") -> list[float]:
    return [one.at_s for one in islice(arriving(conversations(workload, "1"), 10.0, "1"), COUNT)]


def test_a_rate_is_kept_on_average_by_independent_arrivals() -> None:
    found = [after - before for before, after in pairwise(times())]
    assert statistics.mean(found) == pytest.approx(0.1, rel=0.1)
    assert statistics.stdev(found) / statistics.mean(found) == pytest.approx(1, abs=0.15)


def test_a_conversation_counts_with_all_its_turns() -> None:
    assert times("multi-turn") == pytest.approx([TURNS * at_s for at_s in times()])


def trace(*requests: TraceRequest, block_tokens: int = 16) -> Trace:
    return Trace("t", block_tokens, requests)


def text(words: Words, arrival_trace: Trace, number: int) -> str:
    talk = list(replayed(arrival_trace))[number].talk
    return words.text(talk.turns[0].said)


def test_a_trace_is_asked_at_its_times_or_faster() -> None:
    read = trace(TraceRequest(0.0, 20, 5, (1, 2)), TraceRequest(3.0, 8, 0, (3,)))
    assert [one.at_s for one in replayed(sped_up(read, 2))] == [0.0, 1.5]
    assert [one.talk.turns[0].output_tokens for one in replayed(read)] == [5, 1]  # nobody can ask for nothing


def test_requests_of_a_trace_share_the_text_of_the_blocks_that_they_share() -> None:
    read = trace(
        TraceRequest(0, 40, 1, (1, 2, 3)), TraceRequest(1, 48, 1, (1, 2, 4)), TraceRequest(2, 35, 1, (1, 2, 3))
    )
    one, other, again = (text(Words("1"), read, number).split() for number in range(3))
    assert (len(one), len(other), len(again)) == (40, 48, 35)
    assert one[:32] == other[:32]
    assert one[32:35] != other[32:35]
    assert again == one[:35]  # a block that is only begun is the beginning of the whole one


def test_answers_can_all_be_asked_for_in_one_length() -> None:
    found = list(limited(replayed(trace(TraceRequest(0, 8, 99, (1,)))), 7))
    assert [one.talk.turns[0].output_tokens for one in found] == [7]
