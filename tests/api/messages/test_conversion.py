import json
from typing import Any

import pytest

from api.errors import ApiError
from api.messages.conversion import chat_of
from api.messages.requests import MessagesRequest
from api.openai.requests import ChatRequest
from api.reading import read

TOOL = {"name": "look", "description": "Look.", "input_schema": {"properties": {}}}
USE = {"type": "tool_use", "id": "t1", "name": "look", "input": {"b": 1, "a": [2]}}
HI = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> ChatRequest:
    body = {"model": "m", "max_tokens": 8, "messages": HI} | fields
    return chat_of(read(json.dumps(body).encode(), MessagesRequest))


def shown(request: ChatRequest) -> list[tuple[str, Any]]:
    return [(message.role, message.content) for message in request.messages]


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert caught.value.status == 400
    return caught.value


def test_a_system_prompt_comes_first_without_the_line_that_changes_with_every_request() -> None:
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=3"}
    system = [billing, {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    assert shown(chat(system=system)) == [("system", "Be brief."), ("user", "hi")]
    assert shown(chat(system="Be brief.")) == shown(chat(system=system))
    assert shown(chat(system=[billing])) == shown(chat(system="")) == [("user", "hi")]


def test_a_turn_of_tools_becomes_calls_and_results() -> None:
    thought = {"type": "thinking", "thinking": "Where?", "signature": "x"}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "there"}]}
    request = chat(
        tools=[TOOL],
        messages=[
            *HI,
            {"role": "assistant", "content": [thought, {"type": "text", "text": "I look."}, USE]},
            {"role": "user", "content": [{"type": "text", "text": "and?"}, result]},
        ],
    )
    assert shown(request) == [("user", "hi"), ("assistant", "I look."), ("tool", "there"), ("user", "and?")]
    said, found = request.messages[1:3]
    assert said.reasoning_content == "Where?" and found.tool_call_id == "t1"
    assert said.tool_calls is not None
    assert said.tool_calls[0].function.arguments == '{"b":1,"a":[2]}'  # in the client's order
    [tool] = request.tools
    assert tool["function"] == {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {}},
    }
    assert not request.continue_final_message


def test_a_last_message_of_the_assistant_is_continued() -> None:
    begun = [*HI, {"role": "assistant", "content": "I think"}]
    assert chat(messages=begun).continue_final_message
    assert not chat().continue_final_message
    assert not chat(tools=[TOOL], messages=[*HI, {"role": "assistant", "content": [USE]}]).continue_final_message


@pytest.mark.parametrize(("kind", "thinks"), [("enabled", True), ("adaptive", True), ("disabled", False)])
def test_thinking_reaches_the_template(kind: str, thinks: bool) -> None:
    kwargs = chat(thinking={"type": kind, "budget_tokens": 1024}).chat_template_kwargs
    assert kwargs == {"enable_thinking": thinks, "thinking": thinks}
    assert chat().chat_template_kwargs == {}
    given = chat(thinking={"type": kind}, chat_template_kwargs={"thinking": "deep"}).chat_template_kwargs
    assert given["thinking"] == "deep"


def test_sampling_is_passed_on() -> None:
    request = chat(
        stop_sequences=["\n"], temperature=0.5, top_p=0.9, top_k=4, stream=True, output_config={"effort": "low"}
    )
    assert (request.stop, request.temperature, request.top_p, request.top_k) == (["\n"], 0.5, 0.9, 4)
    assert (request.max_tokens, request.stream, request.reasoning_effort) == (8, True, "low")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "odd"}]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "t"}]}]},
            "messages[0].content[0]",
        ),
        ({"tools": [TOOL, {"name": "web_search", "type": "web_search_20250305"}]}, "tools[1]"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice.name"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"thinking": {"type": "often"}}, "thinking.type"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_its_own_name(fields: dict[str, Any], param: str) -> None:
    assert refusal(**fields).param == param


def test_an_image_within_a_result_is_refused_where_it_stands() -> None:
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "image", "source": {}}]}
    error = refusal(messages=[*HI, {"role": "user", "content": [result]}])
    assert error.param == "messages[1].content[0].content[0]" and "is an image" in error.message


@pytest.mark.parametrize("given", [{}, {"disable_parallel_tool_use": False}, {"disable_parallel_tool_use": True}])
def test_calls_in_parallel_can_be_disabled(given: dict[str, Any]) -> None:
    request = chat(tools=[TOOL], tool_choice={"type": "auto"} | given)
    assert request.parallel_tool_calls is not given.get("disable_parallel_tool_use", False)
