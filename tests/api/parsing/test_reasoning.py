from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.parsing.parsed import Parsed
from api.parsing.reasoning import MAX_SPACES
from tests.api.parsing.parsers import calls_in, cut, parser_of, said

CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
PIECES = st.lists(st.sampled_from(["<think>", "</think>", "<thi", "</th", "ink>", "<", " ", "\n", "word"]), max_size=12)

# Shapes of vLLM's tests of its parsers deepseek_r1 and qwen3: text, whether the prompt ends with the marker, reasoning
# and content.
CASES = {
    "begun-in-prompt": ("Let me see</think>It is so", True, "Let me see", "It is so"),
    "begun-in-prompt-no-content": ("Let me see</think>", True, "Let me see", ""),
    "begun-in-prompt-no-end": ("Let me see", True, "Let me see", ""),
    "begun-in-prompt-nothing": ("</think>It is so", True, "", "It is so"),
    "begun-twice": ("<think>Let me see</think>It is so", True, "Let me see", "It is so"),
    "own-marker": ("<think>Let me see</think>It is so", False, "Let me see", "It is so"),
    "own-marker-no-content": ("<think>Let me see</think>", False, "Let me see", ""),
    "own-marker-no-end": ("<think>Let me see", False, "Let me see", ""),
    "lines": ("<think>One\ntwo</think>Three\nfour", False, "One\ntwo", "Three\nfour"),
    "line-break-first": ("\n<think>Let me see</think>\nIt is so", False, "Let me see", "\nIt is so"),
    "empty": ("", True, "", ""),
    "no-reasoning": ("It is so", False, "", "It is so"),
    "marker-later": ("It is <think>so</think>", False, "", "It is <think>so</think>"),
    "end-only": ("It is</think>so", False, "", "It is</think>so"),
    "half-a-marker": ("<thi", False, "", "<thi"),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("step", [1, 4, 1000])
def test_reasoning_is_told_from_content(name: str, step: int) -> None:
    text, begun, reasoning, content = CASES[name]
    parser = parser_of(
        None, "think", prompt_end="<|im_start|>assistant\n<think>\n" if begun else "assistant\n", names=()
    )
    assert said(parser, cut(text, range(0, len(text), step))) == (reasoning, content, ())


def by_the_book(text: str, begun: bool) -> tuple[str, str]:
    start = text.lstrip()
    if not start.startswith("<think>") and not begun:
        return "", text
    reasoning, _, content = (start.removeprefix("<think>") if start.startswith("<think>") else text).partition(
        "</think>"
    )
    return reasoning, content


@given(text=PIECES.map("".join), begun=st.booleans(), cuts=st.sets(st.integers(1, 60)))
def test_slices_make_no_difference_and_nothing_is_lost(text: str, begun: bool, cuts: set[int]) -> None:
    def parsed(slices: list[str]) -> Parsed:
        return said(parser_of(None, "think", prompt_end="<think>" if begun else "", names=()), slices)

    whole = parsed([text])
    assert parsed(cut(text, cuts)) == parsed(list(text)) == whole
    assert whole[:2] == by_the_book(text, begun)


def test_a_prompt_that_ends_reasoning_itself_leaves_none() -> None:
    parser = parser_of(None, "think", prompt_end="<think>\n\n</think>\n\n", names=())
    assert said(parser, ["It is so"]) == ("", "It is so", ())


@pytest.mark.parametrize("text", [f"<think>I need it.\n\n{CALL}", f"<think>I need it.\n\n</think>\n\n{CALL}"])
def test_a_call_ends_reasoning_too(text: str) -> None:
    parsed = said(parser_of("hermes", "think"), text)
    assert (parsed.reasoning, parsed.content, calls_in(parsed)) == ("I need it.\n\n", "", [("f", {})])


def test_a_call_in_the_middle_of_complete_reasoning_is_no_end_without_tools() -> None:
    parsed = said(parser_of("hermes", "think", names=()), f"<think>{CALL}</think>done")
    assert parsed == (CALL, "done", ())


def test_mistrals_markers_are_others() -> None:
    text = '[THINK]so[/THINK][TOOL_CALLS]f{"a": 1}'
    parsed = said(parser_of("mistral", "mistral"), text)
    assert (parsed.reasoning, calls_in(parsed)) == ("so", [("f", {"a": 1})])


@pytest.mark.parametrize(("content", "begun"), [("<think>so", True), ("<think>so</think>then", False), ("so", False)])
def test_a_continued_message_says_itself_whether_it_reasons(content: str, begun: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": content}]
    parser = parser_of(None, "think", prompt_end="<think>", names=(), messages=messages, continue_final_message=True)
    assert said(parser, ["more"]).reasoning == ("more" if begun else "")


def test_reasoning_can_be_left_out() -> None:
    parser = parser_of(None, "think", names=(), include_reasoning=False)
    assert said(parser, "<think>so</think>It is so") == ("", "It is so", ())


@pytest.mark.parametrize("step", [1, 100, 10_000])
def test_spaces_at_the_beginning_are_not_held_for_ever(step: int) -> None:
    text = " " * (MAX_SPACES + 1) + "<think>so"
    assert said(parser_of(None, "think", names=()), cut(text, range(0, len(text), step))) == ("", text, ())
    parser = parser_of(None, "think", names=())
    assert len(parser.feed(" " * 5000).content) == 5000
