"""Detection of times, ids and addresses."""

import time

import pytest

from lab.analysis.breaks.prompts import Piece
from lab.analysis.breaks.repairs import EARLY, KINDS, Values

TIMES = (
    *("2025-06-15", "2025-06-15T10:20:30Z", "2025-06-15 10:20", "2025-06-15T10:20:30.123+02:00", "15.06.2025"),
    *("6/15/2025", "June 15, 2025", "Jun 15", "15 June 2025", "Sunday", "10:20", "10:20:30", "3:20 pm", "1750000000"),
    *("1750000000123", "1750000000.5"),
)
IDS = (
    *("123e4567-e89b-12d3-a456-426614174000", "deadbeef0123", "a1b2c3d4", "837261", "9876543210987654"),
    *("req_8Fj3kL2m1Nq", "sess-0f3a-77aa-9b"),
)
WORDS = ("may", "twelve", "5", "12345", "3.14", "x86", "gpt-4", "monday-like", "a:b", "internationalization", "v2")


def masked(text: str) -> str:
    return Values().masked(Piece("system", text), KINDS).piece.text


@pytest.mark.parametrize("text", TIMES)
def test_a_time_is_seen(text: str) -> None:
    assert masked(f"Now it is {text}, they say.") == "Now it is <time>, they say."


@pytest.mark.parametrize("text", IDS)
def test_an_id_is_seen(text: str) -> None:
    assert masked(f"Session ({text}) begins.") == "Session (<id>) begins."


def test_an_address_is_seen() -> None:
    assert masked("Write to ann.lee+shop@mail.example.com today.") == "Write to <address> today."


@pytest.mark.parametrize("text", WORDS)
def test_words_and_small_numbers_are_left(text: str) -> None:
    assert masked(f"It says {text} here.") == f"It says {text} here."


def test_only_the_kinds_asked_for_are_replaced() -> None:
    found = Values().masked(Piece("user", "At 10:20 for 123456. At\n10:21"), {"time"})
    assert found == (Piece("user", "At <time> for 123456. At\n<time>"), ("10:20", "10:21"))


def test_far_into_a_message_nothing_is_replaced() -> None:
    text = "word " * (EARLY // 5 + 1) + "at 10:20"
    assert masked(text) == text


@pytest.mark.parametrize("letters", ["a-", "a.", "1:", "-", "a1-", "a@", "{", "2025-"])
def test_no_text_takes_long(letters: str) -> None:
    started_s = time.monotonic()
    masked(letters * 10_000)
    assert time.monotonic() - started_s < 2
