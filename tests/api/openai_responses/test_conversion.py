import json
from typing import Any

import pytest

from api.constraints import NamedTool
from api.errors import ApiError
from api.openai_responses.conversion import chat_of
from api.openai_responses.requests import ResponsesRequest
from api.reading import read
from api.requests import ChatRequest

CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": 1}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "there"}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Where?"}]}


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


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "call_id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0]"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_its_own_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
