"""The drawing of `warmroute prefixes`."""

import io
import re
from typing import Any

import click
import msgspec
import pytest

from router.console.prefixes import HINT, draw

TOOL = {
    "model": "m",
    "exact": True,
    "begin": 0,
    "tokens": 2048,
    "prompts": 312,
    "idle_s": 0.4,
    "held_by": 2,
    "replicas": ["replica-0", "replica-2"],
    "text": "system: You are\n a [helpful] assistant. " * 4,
}
QUESTION = TOOL | {
    "begin": 2048,
    "tokens": 512,
    "prompts": 40,
    "idle_s": 90,
    "held_by": 0,
    "replicas": [],
    "text": None,
}
SHARED = {"prompts": 1204, "span_s": 720.0, "texts": True, "prefixes": [TOOL | {"below": [QUESTION]}], "newer": 1}


def drawn(width: int = 80, **changes: Any) -> str:
    file = io.StringIO()
    draw(msgspec.json.encode(SHARED | changes), file, width)
    return file.getvalue()


def test_what_is_shared_is_a_tree_of_plain_text_where_there_is_no_terminal() -> None:
    assert [line.rstrip() for line in drawn().splitlines()] == [
        "What the last 1,204 prompts share (12m)",
        "",
        "prefix tokens  prompts  saves   last  held by           text",
        "2,048              312   637k   0.4s  replica-0, repl…  system: You are a [help…",
        "  +512              40    20k    90s  nobody",
    ]


def test_a_pipe_gets_each_prefix_in_one_line_and_more_of_its_text() -> None:
    file = io.StringIO()
    held = TOOL | {"held_by": 9, "replicas": ["a-replica-with-a-long-name-0", "a-replica-with-a-long-name-1"]}
    draw(msgspec.json.encode(SHARED | {"prefixes": [held]}), file)
    [line] = file.getvalue().splitlines()[3:]
    assert re.match(r"2,048 +312 +637k +0.4s +a-replica-with-a-long-n… +system: You are a \[helpful\] as", line)
    assert line.count("[helpful]") > 2 and line.endswith("…") and len(line) <= 200


def test_a_prompt_cannot_take_hold_of_the_terminal() -> None:
    [line] = drawn(prefixes=[TOOL | {"text": "\x1b[2J\x07 gone \u202e"}], width=200).splitlines()[3:]
    assert line.rstrip().endswith("\\x1b[2J\\x07 gone \\u202e")


def test_texts_that_are_not_kept_are_no_column_but_a_hint() -> None:
    text = drawn(texts=False, prefixes=[QUESTION])
    assert "helpful" not in text and "text" not in text.splitlines()[2]
    assert text.splitlines()[-1] == HINT


@pytest.mark.parametrize(
    ("prompts", "heading"),
    [
        (0, "No prompt is remembered."),
        (1, "Nothing is shared by the last prompt (5.0s)"),
        (7, "Nothing is shared by the last 7 prompts (5.0s)"),
    ],
)
def test_a_lack_of_sharing_is_reported(prompts: int, heading: str) -> None:
    assert drawn(prompts=prompts, span_s=5, prefixes=[]) == f"{heading}\n"


def test_an_answer_that_cannot_be_read_is_reported_in_one_line() -> None:
    with pytest.raises(click.ClickException, match="cannot be read"):
        draw(b"[]", io.StringIO())
