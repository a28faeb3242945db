"""LiteLLM's library, which speaks three APIs."""

import asyncio
import json
import os
from typing import Any, Literal

import litellm
import pytest
from pydantic import BaseModel, Field

NAME = os.environ["MODEL"]
URL = os.environ["ROUTER_URL"]
HELLO: Any = [{"role": "user", "content": "Hello"}]
PROVIDERS: dict[str, Any] = {
    "openai": {"model": f"openai/{NAME}"},
    "hosted_vllm": {"model": f"hosted_vllm/{NAME}", "api_base": f"{URL}/v1", "api_key": os.environ["OPENAI_API_KEY"]},
    "anthropic": {"model": f"anthropic/{NAME}", "max_tokens": 1000},
}
ALL = pytest.mark.parametrize("provider", PROVIDERS)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 40}, "unit": {"enum": ["C", "F"]}},
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
        },
    }
]


class Person(BaseModel):
    name: str = Field(max_length=40)
    age: int
    mood: Literal["good", "bad"]


def chat(provider: str, **more: Any) -> Any:
    return litellm.completion(messages=HELLO, num_retries=0, **PROVIDERS[provider], **more)


def is_weather(arguments: str) -> bool:
    asked = json.loads(arguments)
    return set(asked) == {"city", "unit"} and asked["unit"] in ("C", "F")


@ALL
def test_chat(provider: str) -> None:
    answer = chat(provider)
    assert answer.choices[0].message.content and answer.usage.total_tokens > 0


@ALL
def test_stream(provider: str) -> None:
    chunks = list(chat(provider, stream=True, stream_options={"include_usage": True}))
    whole: Any = litellm.stream_chunk_builder(chunks)
    assert whole.choices[0].message.content and whole.usage.completion_tokens > 0


@ALL
def test_async(provider: str) -> None:
    answer: Any = asyncio.run(litellm.acompletion(messages=HELLO, **PROVIDERS[provider]))
    assert answer.choices[0].message.content


@ALL
def test_required_tool(provider: str) -> None:
    calls = chat(provider, tools=TOOLS, tool_choice="required").choices[0].message.tool_calls
    assert calls and all(is_weather(call.function.arguments) for call in calls)


@ALL
def test_stream_of_a_tool_call(provider: str) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    chunks = list(chat(provider, tools=TOOLS, tool_choice=named, stream=True))
    [call] = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert call.function.name == "get_weather" and is_weather(call.function.arguments)


@ALL
def test_structured_output(provider: str) -> None:
    answer = chat(provider, response_format=Person)
    assert Person.model_validate_json(answer.choices[0].message.content)


def test_text_completion() -> None:
    answer: Any = litellm.text_completion(model=f"text-completion-openai/{NAME}", prompt="Hello", max_tokens=10)
    assert answer.choices[0].text


def test_response_and_its_continuation() -> None:
    first: Any = litellm.responses(model=f"openai/{NAME}", input="Hello", max_output_tokens=20)
    assert first.output_text
    then: Any = litellm.responses(
        model=f"openai/{NAME}", input="And?", previous_response_id=first.id, max_output_tokens=20
    )
    assert then.output_text and then.usage.input_tokens > first.usage.input_tokens


def test_stream_of_a_response() -> None:
    events: list[Any] = list(litellm.responses(model=f"openai/{NAME}", input="Hello", stream=True))
    assert events[0].type == "response.created" and events[-1].type == "response.completed"


@pytest.mark.parametrize("model", [f"anthropic/{NAME}", f"openai/{NAME}"], ids=["anthropic", "openai"])
def test_message(model: str) -> None:
    asked = litellm.anthropic_messages(model=model, messages=HELLO, max_tokens=20)
    answer: Any = asyncio.run(asked)
    assert answer["content"][0]["text"] and answer["stop_reason"] in ("end_turn", "max_tokens")


def test_errors() -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(model=f"openai/{NAME}", messages=[{"role": "user", "content": "so " * 20_000}])
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(model="openai/other", messages=HELLO)
    with pytest.raises(litellm.BadRequestError):
        chat("openai", temperature=-1)
