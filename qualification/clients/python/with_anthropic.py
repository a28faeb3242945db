"""Anthropic's own client."""

import asyncio
import os
from typing import Any, Literal

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic
from pydantic import BaseModel

MODEL = os.environ["MODEL"]
client = Anthropic(max_retries=0)
HELLO: Any = [{"role": "user", "content": "Hello"}]
SHORT: Any = {"model": MODEL, "max_tokens": 20, "messages": HELLO}
LONG: Any = {"model": MODEL, "max_tokens": 1000, "messages": HELLO}
TOOLS: Any = [
    {
        "name": "get_weather",
        "description": "The weather.",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 40}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
    {"name": "get_time", "input_schema": {"type": "object", "properties": {}}},
]
NAMED: Any = {"type": "tool", "name": "get_weather"}


def is_call(block: Any) -> bool:
    assert block.type == "tool_use"
    return block.name == "get_time" or (set(block.input) == {"city", "unit"} and block.input["unit"] in ("C", "F"))


# ---- messages


def test_message() -> None:
    answer = client.messages.create(**SHORT, system="Be kind.", extra_body={"temperature": 0})
    [block] = answer.content
    assert block.type == "text" and block.text
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert answer.usage.input_tokens > 0 and answer.usage.output_tokens > 0


def test_stream() -> None:
    events = list(client.messages.create(**SHORT, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_stream_helper() -> None:
    with client.messages.stream(**SHORT) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert final.content[0].type == "text" and final.content[0].text == text


def test_async_messages_at_once() -> None:
    async def ask_all() -> list[Any]:
        async with AsyncAnthropic(max_retries=0) as many:
            return list(await asyncio.gather(*(many.messages.create(**SHORT) for _ in range(8))))

    assert all(answer.content for answer in asyncio.run(ask_all()))


def test_conversation_with_cache_control() -> None:
    said: Any = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "tell me " * 40, "cache_control": {"type": "ephemeral"}}],
        },
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "More."},
    ]
    first = client.messages.create(model=MODEL, max_tokens=10, messages=said)
    again = client.messages.create(model=MODEL, max_tokens=10, messages=said)
    assert first.content and (again.usage.cache_read_input_tokens or 0) > 0


def test_last_message_of_the_assistant() -> None:
    said: Any = [*HELLO, {"role": "assistant", "content": "The sea is"}]
    assert client.messages.create(model=MODEL, max_tokens=10, messages=said).content


def test_count_of_tokens() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=HELLO, tools=TOOLS).input_tokens
    answer = client.messages.create(**SHORT, tools=TOOLS)
    assert counted == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)


def test_models() -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


# ---- tools


@pytest.mark.parametrize("choice", [{"type": "any"}, NAMED], ids=["any", "named"])
def test_tool(choice: Any) -> None:
    answer = client.messages.create(**LONG, tools=TOOLS, tool_choice=choice)
    assert answer.stop_reason == "tool_use"
    assert answer.content and all(is_call(block) for block in answer.content)


def test_auto_tool() -> None:
    assert client.messages.create(**SHORT, tools=TOOLS).content


@pytest.mark.parametrize("choice", [{"type": "any"}, NAMED], ids=["any", "named"])
def test_stream_of_a_tool_call(choice: Any) -> None:
    with client.messages.stream(**LONG, tools=TOOLS, tool_choice=choice) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    assert "input_json" in kinds
    assert final.content and all(is_call(block) for block in final.content)


def test_answer_to_a_tools_result() -> None:
    first = client.messages.create(**LONG, tools=TOOLS, tool_choice=NAMED)
    call: Any = first.content[0]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "12 C"}
    said: Any = [*HELLO, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(model=MODEL, max_tokens=10, messages=said, tools=TOOLS).content


def test_tool_runner() -> None:
    @anthropic.beta_tool
    def get_time() -> str:
        """The time."""
        return "noon"

    runner = client.beta.messages.tool_runner(
        model=MODEL, max_tokens=200, messages=HELLO, tools=[get_time], tool_choice={"type": "any"}, max_iterations=2
    )
    answers = list(runner)
    assert len(answers) == 2 and answers[0].stop_reason == "tool_use"


# ---- structured outputs


class Person(BaseModel):
    name: str
    age: int
    mood: Literal["good", "bad"]
    tags: list[str]


def test_parsed_message() -> None:
    answer = client.messages.parse(**LONG, output_format=Person)
    assert isinstance(answer.parsed_output, Person)


def test_stream_of_a_parsed_message() -> None:
    with client.messages.stream(**LONG, output_format=Person) as stream:
        assert isinstance(stream.get_final_message().parsed_output, Person)


# ---- errors


def test_a_wrong_key_is_refused() -> None:
    with Anthropic(api_key="wrong", max_retries=0) as stranger, pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(**SHORT)


def test_errors() -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**SHORT, "model": "other"})
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(**SHORT, extra_body={"temperature": -1})
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(model=MODEL, max_tokens=5, messages=[{"role": "user", "content": "so " * 20_000}])
