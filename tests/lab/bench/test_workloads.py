"""Shared text and lengths of the six kinds of traffic."""

import statistics
from itertools import islice

import pytest

from lab.bench.prompts import asked_tokens
from lab.bench.words import Passage
from lab.bench.workloads import BATCH_DOCUMENTS, QUESTIONS, TURNS, WORKLOADS, Conversation, conversations


def some(workload: str, count: int = 200, seed: str = "1") -> list[Conversation]:
    return list(islice(conversations(workload, seed), count))


def prompt(talk: Conversation, turn: int = 0) -> list[Passage]:
    return [*talk.system, *talk.turns[turn].said]


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
        ("code", 2000, 2800),
        ("batch", 640, 720),
        ("random", 500, 600),
    ],
)
def test_prompts_are_as_long_as_the_page_says(workload: str, least: float, most: float) -> None:
    assert least <= mean_tokens(workload) <= most


def test_a_chatbot_has_one_system_prompt_and_questions_of_its_own() -> None:
    found = some("chatbot")
    assert {talk.system for talk in found} == {(Passage("system", 1000),)}
    assert len({talk.turns[0].said for talk in found}) == len(found)


def test_a_turn_says_all_that_was_said_before_it() -> None:
    [talk] = islice(conversations("multi-turn", "1", think_s=3.0), 1)
    assert [turn.think_s >= 1.5 for turn in talk.turns] == [False, *[True] * (TURNS - 1)]
    lengths = [asked_tokens(talk, number) for number in range(TURNS)]
    said = [turn.said[0].tokens for turn in talk.turns]
    answers = [turn.output_tokens for turn in talk.turns]
    assert lengths == [1000 + sum(said[: n + 1]) + sum(answers[:n]) for n in range(TURNS)]


def test_nothing_is_shared_in_random_and_only_the_instructions_in_rag() -> None:
    random = [passage for talk in some("random") for passage in prompt(talk)]
    assert len(set(random)) == len(random)
    documents = [passage for talk in some("rag") for passage in talk.turns[0].said]
    assert len(set(documents)) == len(documents)
    assert len({talk.system for talk in some("rag")}) == 1


def test_a_quarter_of_code_continues_in_files_that_were_open_before() -> None:
    seen: set[tuple[Passage, ...]] = set()
    again = 0
    for talk in some("code", 1000):
        files = talk.turns[0].said[:-1]
        again += files in seen and len(files) > 1
        seen.add(files)
    assert 0.15 < again / 1000 < 0.35


def test_a_batch_comes_document_by_document() -> None:
    size = BATCH_DOCUMENTS * QUESTIONS
    documents = [talk.turns[0].said[0] for talk in some("batch", size)]
    assert all(len(set(documents[n : n + QUESTIONS])) == 1 for n in range(0, size, QUESTIONS))
