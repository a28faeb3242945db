import json
from typing import Any

import pytest

from api.errors import ApiError
from api.openai.constraint_fields import NamedTool
from api.openai.constraints import constraint_of
from api.openai.requests import ChatRequest
from api.openai_responses.conversion import chat_of
from api.openai_responses.requests import ResponsesRequest
from api.reading import read

CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": 1}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "there"}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Where?"}]}


FORMAT = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}
PATCH = {"type": "custom", "name": "patch", "description": "Patch files.", "format": FORMAT}
AGENTS = {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "look"}, {"type": "other"}]}


def chat(**fields: Any) -> ChatRequest:
    return chat_of(read(json.dumps({"model": "m", "input": "hi"} | fields).encode(), ResponsesRequest))


def shown(request: ChatRequest) -> list[tuple[str, Any]]:
    return [(message.role, message.content) for message in request.messages]


def test_a_text_is_a_users_message_after_the_instructions() -> None:
    assert shown(chat(instructions="Be brief.")) == [("system", "Be brief."), ("user", "hi")]


def test_what_the_assistant_did_in_one_turn_is_one_message() -> None:
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]}
    request = chat(input=[{"role": "user", "content": "hi"}, THOUGHT, said, CALL, RESULT, {**said, "content": "Here."}])
    assert shown(request) == [("user", "hi"), ("assistant", "I look."), ("tool", "there"), ("assistant", "Here.")]
    turn = request.messages[1]
    assert turn.reasoning_content == "Where?" and turn.tool_calls is not None
    assert turn.tool_calls[0].function.arguments == '{"at": 1}'


def test_earlier_items_come_first_and_the_new_instructions_before_them() -> None:
    request = chat(instructions="New.", previous_items=[{"role": "user", "content": "old"}])
    assert shown(request) == [("system", "New."), ("user", "old"), ("user", "hi")]


def test_the_tools_that_are_allowed_are_passed_on() -> None:
    tools = [{"type": "function", "name": name} for name in ("look", "go")]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "go"}]}
    found = chat(tools=tools, tool_choice=choice).tool_choice
    assert isinstance(found, NamedTool) and found.names == ["go"] and found.is_forced


def test_tools_and_settings_are_passed_on() -> None:
    tool = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": None}
    request = chat(tools=[tool], tool_choice="auto", reasoning={"effort": "low"}, max_output_tokens=9, temperature=0)
    assert request.tools == [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    assert (request.reasoning_effort, request.output_limit, request.temperature) == ("low", 9, 0)


def test_a_custom_tool_is_shown_as_a_function_of_its_input() -> None:
    [shown_tool] = chat(tools=[PATCH], parallel_tool_calls=False).tools
    function = shown_tool["function"]
    assert function["name"] == "patch" and list(function["parameters"]["properties"]) == ["input"]
    assert function["description"] == 'Patch files.\n\nThe input follows this lark grammar:\nstart: "x"'
    plain = chat(tools=[{"type": "custom", "name": "patch", "format": {"type": "text"}}]).tools
    assert "description" not in plain[0]["function"]


def test_tools_of_a_namespace_have_both_names_and_others_are_left_out() -> None:
    request = chat(
        tools=[{"type": "web_search", "external_web_access": True}, AGENTS, PATCH], parallel_tool_calls=False
    )
    assert [tool["function"]["name"] for tool in request.tools] == ["agents__look", "patch"]
    assert request.parallel_tool_calls is False
    assert chat(tools=[{"type": "web_search"}], tool_choice="auto").tools == []


@pytest.mark.parametrize("name", ["look", "agents__look"])
def test_a_choice_names_a_tool_in_its_namespace_or_with_it(name: str) -> None:
    choice = chat(tools=[AGENTS], tool_choice={"type": "function", "name": name}).tool_choice
    assert isinstance(choice, NamedTool) and choice.names == ["agents__look"]


def test_an_allowed_tool_may_be_one_of_a_namespace() -> None:
    allowed = [{"type": "function", "name": "look"}, {"type": "custom", "name": "patch"}]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": allowed}
    found = chat(tools=[AGENTS, PATCH], tool_choice=choice).tool_choice
    assert isinstance(found, NamedTool) and found.names == ["agents__look", "patch"] and not found.is_forced


def test_calls_of_custom_tools_and_in_namespaces_are_shown_as_the_model_made_them() -> None:
    patch = {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": 'a\n"é"'}
    done = {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "ok"}]}
    request = chat(input=[CALL | {"namespace": "agents"}, patch, RESULT, done])
    turn, *results = request.messages
    assert turn.tool_calls is not None
    calls = [(call.id, call.function.name, json.loads(call.function.arguments)) for call in turn.tool_calls]
    assert calls == [("c1", "agents__look", {"at": 1}), ("c2", "patch", {"input": 'a\n"é"'})]
    assert [(result.tool_call_id, result.content) for result in results] == [("c1", "there"), ("c2", "ok")]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "call_id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
        ({"tools": [{"type": "custom"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "x", "tools": [{"type": "function"}]}]}, "tools[0].tools[0].name"),
        ({"input": [{"type": "custom_tool_call", "call_id": "x", "name": "patch"}]}, "input[0]"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_its_own_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(("tools", "choice"), [([], "required"), ([PATCH], {"type": "custom", "name": "y"})])
def test_a_choice_of_a_tool_that_is_not_shown_is_refused(tools: list[Any], choice: Any) -> None:
    request = chat(tools=[*tools, {"type": "web_search"}], tool_choice=choice)
    with pytest.raises(ApiError) as caught:
        constraint_of(request)
    assert (caught.value.status, caught.value.param) == (400, "tool_choice")
