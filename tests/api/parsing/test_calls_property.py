"""Properties of all formats: slices make no difference, text that is no call is unchanged, arguments arrive whole."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.parsing.calls import MAX_HELD
from api.parsing.formats import CALL_PARSERS
from tests.api.parsing.parsers import calls_in, cut, parser_of, said

# Pieces of which calls, and texts that are almost calls, are made.
FRAGMENTS = {
    "hermes": ["<tool_call>", "</tool_call>", "<tool_", "<", "</"],
    "llama3_json": ["<|python_tag|>", ";", "; ", "<|py", '{"type": "function", "name": "add", "parameters": '],
    "mistral": ["[TOOL_CALLS]", "[/TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[TOOL", "add{", "[", "]", "x9"],
}
COMMON = [
    '{"name": "add", "arguments": ',
    '"arguments": {"a": [1, "}"]}',
    '"name": "add"',
    *('{"a": 1}', "{", "}", "[", "]", '"', "\\", ":", ",", " ", "\n", "\x00", "words", "é", "null", "<think>"),
    "</think>",
]
CUTS = st.sets(st.integers(1, 200), max_size=20)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text(max_size=8), values, max_size=4),
    max_leaves=8,
)
NAMED = st.dictionaries(st.text("abcxyz_", min_size=1, max_size=6), JSON, max_size=4)


def texts(name: str) -> st.SearchStrategy[str]:
    fragments = st.sampled_from(COMMON + FRAGMENTS[name])
    return st.lists(fragments | st.text(max_size=3), max_size=24).map("".join)


def written(name: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Calls as a model of this format writes them."""
    objects = [json.dumps({"name": called, "arguments": arguments}) for called, arguments in calls]
    match name:
        case "hermes":
            return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)
        case "llama3_json":
            return "; ".join(objects)
        case "mistral":
            return "".join(f"[TOOL_CALLS]{called}{json.dumps(arguments)}" for called, arguments in calls)
    shown = (", ".join(f"{key}={value!r}" for key, value in arguments.items()) for _, arguments in calls)
    return "[" + ", ".join(f"{called}({given})" for (called, _), given in zip(calls, shown, strict=True)) + "]"


@pytest.mark.parametrize("reasoning", ["", "think"])
@pytest.mark.parametrize("name", CALL_PARSERS)
@given(data=st.data(), cuts=CUTS)
def test_what_is_said_depends_on_the_text_and_not_on_its_slices(
    name: str, reasoning: str, data: st.DataObject, cuts: set[int]
) -> None:
    text = data.draw(texts(name))
    whole = said(parser_of(name, reasoning), [text])
    assert said(parser_of(name, reasoning), cut(text, cuts)) == whole
    assert said(parser_of(name, reasoning), text) == whole


@pytest.mark.parametrize("name", CALL_PARSERS)
@given(data=st.data(), place=st.integers(0, 100))
def test_what_is_said_after_the_beginning_of_a_text_depends_on_the_beginning_only(
    name: str, data: st.DataObject, place: int
) -> None:
    text = data.draw(texts(name))[:place]
    at_once, one_by_one = parser_of(name, "think"), parser_of(name, "think")
    pieces = [one_by_one.feed(char) for char in text]
    said_at_once = at_once.feed(text)
    assert "".join(piece.content for piece in pieces) == said_at_once.content
    assert "".join(piece.reasoning for piece in pieces) == said_at_once.reasoning
    arguments = "".join(call.arguments for piece in pieces for call in piece.calls)
    assert arguments == "".join(call.arguments for call in said_at_once.calls)


@pytest.mark.parametrize("name", CALL_PARSERS)
@given(data=st.data())
def test_no_character_is_lost_or_invented_where_nothing_is_a_call(name: str, data: st.DataObject) -> None:
    text = data.draw(texts(name))
    parsed = said(parser_of(name), [text])
    if parsed.calls:
        rest = iter(text)
        assert all(char in rest for char in parsed.content)  # in the text's order
    else:
        assert parsed.content == text


@pytest.mark.parametrize("name", CALL_PARSERS)
@given(arguments=NAMED, count=st.integers(1, 3), cuts=CUTS)
def test_arguments_arrive_as_they_were_written(
    name: str, arguments: dict[str, Any], count: int, cuts: set[int]
) -> None:
    calls = [(("add", "search", "f")[place], arguments) for place in range(count)]
    parsed = said(parser_of(name), cut(written(name, calls), cuts))
    assert calls_in(parsed) == calls
    assert [call.index for call in parsed.calls] == list(range(len(calls)))
    assert parsed.content == ""


@pytest.mark.parametrize("name", CALL_PARSERS)
@given(arguments=NAMED)
def test_the_name_comes_first_and_once(name: str, arguments: dict[str, Any]) -> None:
    parser = parser_of(name)
    pieces = [call for char in written(name, [("add", arguments)]) for call in parser.feed(char).calls]
    assert [piece.name for piece in pieces] == ["add"] + [None] * (len(pieces) - 1)
    assert len({piece.id for piece in pieces}) == 1


@pytest.mark.parametrize(
    ("name", "beginning", "more"),
    [
        ("hermes", '<tool_call>{"x": "', "a"),
        ("hermes", '<tool_call>{"name": "f", "y": [', "[1],"),
        ("hermes", "<tool_call>", " "),
        ("hermes", "", "\n"),
        ("llama3_json", '{"type": "', "a"),
        ("mistral", "[TOOL_CALLS][", " "),
        ("mistral", "[TOOL_CALLS]", "a"),
    ],
)
def test_no_more_than_a_limit_is_held_back(name: str, beginning: str, more: str) -> None:
    parser = parser_of(name)
    text = beginning + more * (3 * MAX_HELD // len(more))
    content = "".join(parser.feed(text[at : at + 1000]).content for at in range(0, len(text), 1000))
    assert len(content) >= len(text) - MAX_HELD - 1
    assert content + parser.finish().content == text


@pytest.mark.parametrize(
    ("name", "beginning"),
    [("hermes", '<tool_call>{"name": "f", "arguments": {"x": "'), ("mistral", '[TOOL_CALLS]f{"x": "')],
)
def test_arguments_are_passed_on_at_once_however_long(name: str, beginning: str) -> None:
    parser = parser_of(name)
    parser.feed(beginning)
    for _ in range(100):
        [delta] = parser.feed("word " * 200).calls
        assert delta.arguments == "word " * 200
