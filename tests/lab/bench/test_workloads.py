"""Shared text and lengths of the four kinds of traffic."""

import statistics
from itertools import islice

import pytest

from lab.bench.prompts import asked_tokens
from lab.bench.workloads import TURNS, WORKLOADS, Conversation, conversations


def some(workload: str, count: int = 200, seed: str = "1") -> list[Conversation]:
    return list(islice(conversations(workload, seed), count))


def mean_tokens(workload: str) -> float:
    return statistics.mean(asked_tokens(talk, 0) for talk in some(workload, 500))


@pytest.mark.parametrize("workload", WORKLOADS)
def test_equal_seeds_ask_the_same_and_others_do_not(workload: str) -> None:
    assert some(workload) == some(workload)
    assert some(workload) != some(workload, seed="2")


@pytest.mark.parametrize("workload", WORKLOADS)
def test_names_are_different_or_turns_could_not_be_distinguished(workload: str) -> None:
    assert len({talk.name for talk in some(workload, 500)}) == 500


@pytest.mark.parametrize(
    ("workload", "least", "most"),
    [
        ("chatbot", 1016, 1048),
        ("multi-turn", 1090, 1110),
        ("rag", 2304, 2304),
        ("random", 500, 600),
    ],
)
def test_prompts_are_as_long_as_the_page_says(workload: str, least: float, most: float) -> None:
    assert least <= mean_tokens(workload) <= most


def test_a_turn_says_all_that_was_said_before_it() -> None:
    [talk] = islice(conversations("multi-turn", "1", think_s=3.0), 1)
    assert [turn.think_s >= 1.5 for turn in talk.turns] == [False, *[True] * (TURNS - 1)]
    lengths = [asked_tokens(talk, number) for number in range(TURNS)]
    said = [turn.said[0].tokens for turn in talk.turns]
    answers = [turn.output_tokens for turn in talk.turns]
    assert lengths == [1000 + sum(said[: n + 1]) + sum(answers[:n]) for n in range(TURNS)]
