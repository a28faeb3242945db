import json
from typing import Literal

import pytest

from api.openai.constraint_fields import AllowedTool, AllowedTools, NamedFunction, NamedTool
from api.openai.requests import ChatRequest
from api.parsing.answer import answer_parser, call_id, parsed_tokens
from api.parsing.formats import REASONING, AnswerFormats
from api.parsing.parsed import CallDelta, Parsed, in_order, merged
from tests.api.parsing.parsers import calls_in, chat, cut, parser_of, said

ANSWER = "chatcmpl-1"
HERMES = AnswerFormats("hermes", REASONING["think"], frozenset({1}), frozenset({2}))
CALLS = [("f", {"a": 1}), ("add", {})]
REQUIRED = json.dumps([{"name": name, "parameters": arguments} for name, arguments in CALLS])


def allowed(mode: Literal["auto", "required"], *names: str) -> NamedTool:
    tools = [AllowedTool(NamedFunction(name)) for name in names or ("f", "add")]
    return NamedTool(None, "allowed_tools", AllowedTools(mode, tools))


def forced(choice: object, *names: str) -> ChatRequest:
    """A request as it is once `tool_choice` has been checked."""
    request = chat(names) if names else chat()
    request.tool_choice = choice  # type: ignore[assignment,unused-ignore]
    return request


def test_there_is_no_parser_where_nothing_is_to_be_parsed() -> None:
    assert answer_parser(chat(), AnswerFormats(), ANSWER, 0) is None
    assert answer_parser(chat(()), AnswerFormats("hermes"), ANSWER, 0) is None
    assert answer_parser(chat(tool_choice="none"), AnswerFormats("hermes"), ANSWER, 0) is None
    assert answer_parser(chat(), HERMES, ANSWER, 0, constrained=True) is None


def test_an_id_is_made_of_the_answer_the_choice_and_the_call() -> None:
    ids = {call_id(*parts) for parts in (("a", 0, 0), ("a", 0, 1), ("a", 1, 0), ("b", 0, 0))}
    assert len(ids) == 4
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 2
    calls = said(parser_of("hermes"), text).calls
    assert [call.id for call in calls] == [call_id(ANSWER, 0, 0), call_id(ANSWER, 0, 1)]
    assert all(call.id.startswith("call_") for call in calls)


def test_an_id_for_mistrals_templates_has_nine_letters_and_digits() -> None:
    [call] = said(parser_of("mistral"), "[TOOL_CALLS]f{}").calls
    assert len(call.id) == 9 and call.id.isalnum()


def test_without_parallel_calls_the_first_is_the_only_one() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 2
    assert calls_in(said(parser_of("hermes", parallel_tool_calls=False), text)) == [("f", {})]


@pytest.mark.parametrize("step", [1, 5, 1000])
def test_a_required_answer_is_a_list_of_calls(step: int) -> None:
    parser = answer_parser(forced("required"), HERMES, ANSWER, 0, prompt_end="<think>\n", constrained=True)
    assert parser is not None
    parsed = said(parser, cut(REQUIRED, range(0, len(REQUIRED), step)))
    assert (parsed.reasoning, parsed.content, calls_in(parsed)) == ("", "", CALLS)


@pytest.mark.parametrize("text", ["no calls", "[1, 2]", '{"name": "f", "parameters": {}}', "[]"])
def test_a_required_answer_that_is_no_list_of_calls_is_text(text: str) -> None:
    parser = answer_parser(forced("required"), HERMES, ANSWER, 0)
    assert parser is not None
    assert said(parser, text) == ("", text, ())


@pytest.mark.parametrize("step", [1, 5, 1000])
def test_an_answer_for_a_named_function_is_its_arguments(step: int) -> None:
    request = forced(NamedTool(NamedFunction("f")))
    parser = answer_parser(request, HERMES, ANSWER, 2, prompt_end="<think>\n", constrained=True)
    assert parser is not None
    parsed = said(parser, cut(' {"a": "<think>"}', range(0, 17, step)))
    assert parsed == ("", "", (CallDelta(0, call_id(ANSWER, 2, 0), "f", '{"a": "<think>"}'),))


def test_a_required_answer_of_allowed_tools_is_a_list_of_calls() -> None:
    parser = answer_parser(forced(allowed("required")), HERMES, ANSWER, 0, constrained=True)
    assert parser is not None and calls_in(said(parser, REQUIRED)) == CALLS


def test_where_a_call_has_no_marker_it_is_one_of_the_allowed_tools() -> None:
    text = '{"name": "f", "parameters": {}}'
    free = answer_parser(chat(("f", "g")), AnswerFormats("llama3_json"), ANSWER, 0)
    parser = answer_parser(forced(allowed("auto", "g"), "f", "g"), AnswerFormats("llama3_json"), ANSWER, 0)
    assert free is not None and parser is not None
    assert calls_in(said(free, text)) == [("f", {})]
    assert said(parser, text).content == text


def test_a_parser_sees_the_special_tokens_of_what_it_parses() -> None:
    assert parsed_tokens(chat(), HERMES) == {1, 2}
    assert parsed_tokens(chat(()), HERMES) == parsed_tokens(chat(tool_choice="none"), HERMES) == {2}
    assert parsed_tokens(forced("required"), HERMES) == set()


def test_content_after_a_call_can_be_had_after_it() -> None:
    text = (
        'a<tool_call>{"name": "f", "arguments": {}}</tool_call>b<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    )
    pieces = list(in_order(parser_of("hermes"), text))
    assert [(piece.content, [call.index for call in piece.calls]) for piece in pieces] == [("a", [0]), ("b", [1])]
    whole = Parsed()
    for piece in pieces:
        whole = merged(whole, piece)
    assert whole == parser_of("hermes").feed(text)
