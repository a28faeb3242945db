"""OpenAI's own client."""

import asyncio
import json
import os
from typing import Any, Literal

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

MODEL = os.environ["MODEL"]
client = OpenAI(max_retries=0)
HELLO: Any = [{"role": "user", "content": "Hello"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 40}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "The weather.", "parameters": PARAMETERS}
TOOLS: Any = [
    {"type": "function", "function": FUNCTION},
    {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}},
]
RESPONSES_TOOL: Any = {"type": "function", "strict": True, **FUNCTION}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


class Person(BaseModel):
    name: str
    age: int
    mood: Literal["good", "bad"]
    tags: list[str]


class Weather(BaseModel):
    """The weather."""

    city: str
    unit: Literal["C", "F"]


def is_weather(arguments: str) -> bool:
    asked = json.loads(arguments)
    return set(asked) == {"city", "unit"} and asked["unit"] in ("C", "F")


# ---- models


def test_models() -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


# ---- chat


def test_chat() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_completion_tokens=20, temperature=0)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None and answer.usage.total_tokens > answer.usage.prompt_tokens > 0


def test_stream_of_chat() -> None:
    asked: Any = {"model": MODEL, "messages": HELLO, "max_completion_tokens": 20, "seed": 1}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens > 0


def test_stream_helper_of_chat() -> None:
    with client.chat.completions.stream(model=MODEL, messages=HELLO) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.delta" in kinds and "content.done" in kinds
    assert final.choices[0].message.content


def test_async_chats_at_once() -> None:
    async def ask_all() -> list[str | None]:
        async with AsyncOpenAI(max_retries=0) as many:
            asked = (
                many.chat.completions.create(model=MODEL, messages=HELLO, max_completion_tokens=10) for _ in range(8)
            )
            return [answer.choices[0].message.content for answer in await asyncio.gather(*asked)]

    assert all(asyncio.run(ask_all()))


def test_chat_with_parts_and_a_developer_message() -> None:
    said: Any = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "you"}]},
    ]
    assert client.chat.completions.create(model=MODEL, messages=said, max_tokens=10).choices[0].message.content


def test_several_choices_with_log_probabilities() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, n=2, max_tokens=5, logprobs=True, top_logprobs=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and len(logprobs.content[0].top_logprobs) == 2


# ---- tools


def test_required_tool() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, tools=TOOLS, tool_choice="required")
    calls = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls" and calls
    for call in calls:
        assert call.type == "function"
        assert call.function.name == "get_time" or is_weather(call.function.arguments)


def test_named_tool() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, tools=TOOLS, tool_choice=NAMED)
    [call] = answer.choices[0].message.tool_calls or []
    assert call.type == "function" and call.function.name == "get_weather" and is_weather(call.function.arguments)


def test_auto_tool() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, tools=TOOLS, tool_choice="auto")
    message = answer.choices[0].message
    assert message.content or message.tool_calls


def test_allowed_tools() -> None:
    choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, tools=TOOLS, tool_choice=choice)
    calls = answer.choices[0].message.tool_calls or []
    assert calls and all(call.type == "function" and is_weather(call.function.arguments) for call in calls)


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_stream_of_tool_calls(choice: Any) -> None:
    chunks = client.chat.completions.create(
        model=MODEL, messages=HELLO, tools=TOOLS[:1], tool_choice=choice, stream=True
    )
    name, arguments, finished = "", "", None
    for chunk in chunks:
        for call in chunk.choices[0].delta.tool_calls or []:
            if call.index == 0 and call.function is not None:
                name += call.function.name or ""
                arguments += call.function.arguments or ""
        finished = chunk.choices[0].finish_reason or finished
    assert name == "get_weather" and is_weather(arguments)
    assert finished in ("tool_calls", "stop")


def test_answer_to_a_tools_result() -> None:
    first = client.chat.completions.create(model=MODEL, messages=HELLO, tools=TOOLS, tool_choice=NAMED)
    message = first.choices[0].message
    [call] = message.tool_calls or []
    said: Any = [*HELLO, message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "12 C"}]
    answer = client.chat.completions.create(model=MODEL, messages=said, tools=TOOLS, max_tokens=20)
    assert answer.choices[0].message.content is not None


# ---- structured outputs


def test_parsed_chat() -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=HELLO, response_format=Person)
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_stream_of_a_parsed_chat() -> None:
    with client.chat.completions.stream(model=MODEL, messages=HELLO, response_format=Person) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Person)


def test_parsed_tool() -> None:
    tool = openai.pydantic_function_tool(Weather)
    answer = client.chat.completions.parse(model=MODEL, messages=HELLO, tools=[tool], tool_choice="required")
    calls = answer.choices[0].message.tool_calls or []
    assert calls and isinstance(calls[0].function.parsed_arguments, Weather)


def test_json_object() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, response_format={"type": "json_object"})
    assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


# ---- completions


def test_completion() -> None:
    answer = client.completions.create(model=MODEL, prompt=["Hello", "World"], max_tokens=8, echo=True, logprobs=1)
    assert [choice.text[:5] for choice in answer.choices] == ["Hello", "World"]


def test_stream_of_a_completion() -> None:
    chunks = list(client.completions.create(model=MODEL, prompt="Hello", max_tokens=8, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)


# ---- responses


def test_response() -> None:
    answer = client.responses.create(model=MODEL, input="Hello", instructions="Be kind.", max_output_tokens=20)
    assert answer.output_text and answer.status in ("completed", "incomplete")
    assert answer.usage is not None and answer.usage.output_tokens > 0


def test_stream_of_a_response() -> None:
    events = list(client.responses.create(model=MODEL, input="Hello", max_output_tokens=20, stream=True))
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_stream_helper_of_responses() -> None:
    with client.responses.stream(model=MODEL, input="Hello", text_format=Person) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Person)


def test_parsed_response() -> None:
    assert isinstance(client.responses.parse(model=MODEL, input="Hello", text_format=Person).output_parsed, Person)


def test_response_after_a_response() -> None:
    first = client.responses.create(model=MODEL, input="Hello", max_output_tokens=10)
    then = client.responses.create(model=MODEL, input="And?", max_output_tokens=10, previous_response_id=first.id)
    assert then.previous_response_id == first.id
    assert then.usage is not None and first.usage is not None
    assert then.usage.input_tokens > first.usage.input_tokens
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model=MODEL, input="And?", previous_response_id=first.id)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}], ids=["required", "named"])
def test_tool_of_a_response_and_its_result(choice: Any) -> None:
    first = client.responses.create(model=MODEL, input="Hello", tools=[RESPONSES_TOOL], tool_choice=choice)
    call = first.output[0]
    assert call.type == "function_call" and is_weather(call.arguments)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "12 C"}
    then = client.responses.create(
        model=MODEL, input=[result], previous_response_id=first.id, max_output_tokens=10, tools=[RESPONSES_TOOL]
    )
    assert then.output_text


def test_output_as_input_without_storage() -> None:
    first = client.responses.create(model=MODEL, input="Hello", max_output_tokens=10, store=False)
    said: Any = [{"role": "user", "content": "Hello"}, *first.output, {"role": "user", "content": "And?"}]
    assert client.responses.create(model=MODEL, input=said, max_output_tokens=10, store=False).output_text


def test_allowed_tools_of_a_response() -> None:
    tools: Any = [RESPONSES_TOOL, {"type": "function", "name": "get_time", "parameters": {"type": "object"}}]
    choice: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]}
    answer = client.responses.create(model=MODEL, input="Hello", tools=tools, tool_choice=choice)
    calls = answer.output
    assert calls and all(call.type == "function_call" and is_weather(call.arguments) for call in calls)


def test_parsed_tool_of_a_response_beside_a_format() -> None:
    tool = openai.pydantic_function_tool(Weather)["function"]
    asked: Any = {"tools": [{"type": "function", **tool}], "tool_choice": "required", "text_format": Person}
    answer = client.responses.parse(model=MODEL, input="Hello", **asked)
    assert answer.output and answer.output[0].type == "function_call"


# ---- what is refused


@pytest.mark.parametrize(
    "ask",
    [
        lambda: client.conversations.create(),
        lambda: client.responses.input_tokens.count(model=MODEL, input="Hello"),
        lambda: client.responses.input_items.list(client.responses.create(model=MODEL, input="Hello").id),
    ],
    ids=["conversations", "count of input tokens", "input items"],
)
def test_parts_of_the_responses_api_are_refused(ask: Any) -> None:
    """The error is one that applications catch."""
    with pytest.raises(openai.APIStatusError) as refused:
        ask()
    assert refused.value.status_code in (404, 405)


def test_embeddings_are_refused() -> None:
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=MODEL, input="Hello")


def test_a_wrong_key_is_refused() -> None:
    with OpenAI(api_key="wrong", max_retries=0) as stranger, pytest.raises(openai.AuthenticationError):
        stranger.chat.completions.create(model=MODEL, messages=HELLO)


def test_errors() -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=HELLO)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=MODEL, messages=HELLO, temperature=-1)
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt="so " * 20_000)
    assert long.value.code == "context_length_exceeded"
