"""Pydantic AI's agents, over OpenAI's two APIs and Anthropic's."""

import asyncio
import os
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, PromptedOutput, Tool, ToolOutput
from pydantic_ai.exceptions import UnexpectedModelBehavior
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

NAME = os.environ["MODEL"]
MODELS: dict[str, Any] = {
    "chat": lambda: OpenAIChatModel(NAME),
    "responses": lambda: OpenAIResponsesModel(NAME),
    "messages": lambda: AnthropicModel(NAME),
}
APIS = pytest.mark.parametrize("api", MODELS)
OPENAIS = pytest.mark.parametrize("api", ["chat", "responses"])


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=40)
    age: int
    mood: Literal["good", "bad"]


class Place(BaseModel):
    """A place."""

    name: str = Field(max_length=40)


def agent(api: str, **more: Any) -> Any:
    return Agent(MODELS[api](), model_settings={"max_tokens": 1000}, retries=0, **more)


def ask(asked: Any, text: str = "A person?", **more: Any) -> Any:
    return asyncio.run(asked.run(text, **more))


@APIS
def test_text(api: str) -> None:
    result = ask(agent(api, instructions="Be kind."))
    assert result.output and result.usage.output_tokens > 0


@APIS
def test_conversation(api: str) -> None:
    async def talk() -> Any:
        asked = agent(api)
        first = await asked.run("Hello")
        return await asked.run("And?", message_history=first.all_messages())

    assert asyncio.run(talk()).output


@APIS
def test_stream(api: str) -> None:
    async def listen() -> tuple[str, str]:
        async with agent(api).run_stream("Hello") as streamed:
            pieces = [piece async for piece in streamed.stream_text(delta=True)]
            return "".join(pieces), await streamed.get_output()

    said, whole = asyncio.run(listen())
    assert whole and said == whole


@APIS
def test_output_by_tool(api: str) -> None:
    assert isinstance(ask(agent(api, output_type=ToolOutput(Person))).output, Person)


@APIS
def test_output_of_one_of_two_tools(api: str) -> None:
    assert isinstance(ask(agent(api, output_type=[Person, Place])).output, Person | Place)


@OPENAIS
def test_output_by_schema(api: str) -> None:
    assert isinstance(ask(agent(api, output_type=NativeOutput(Person))).output, Person)


@OPENAIS
def test_stream_of_output_by_schema(api: str) -> None:
    async def listen() -> Any:
        async with agent(api, output_type=NativeOutput(Person)).run_stream("A person?") as streamed:
            return [one async for one in streamed.stream_output()][-1]

    assert isinstance(asyncio.run(listen()), Person)


@OPENAIS
def test_output_by_prompt(api: str) -> None:
    """JSON mode: any object, so the client is to say that this one is no person."""
    with pytest.raises(UnexpectedModelBehavior, match="output"):
        ask(agent(api, output_type=PromptedOutput(Person)))


@APIS
def test_tool_and_output_tool(api: str) -> None:
    called: list[str] = []

    def get_weather(city: Literal["Oslo", "Rome"]) -> str:
        """Return the weather."""
        called.append(city)
        return "12 C"

    async def until_called(_: Any, tool: Any) -> Any:
        """Offer the tool until it has been called: the model would go on for ever."""
        return None if called else tool

    asked = agent(api, output_type=ToolOutput(Person), tools=[Tool(get_weather, prepare=until_called)])
    assert isinstance(ask(asked).output, Person)
    assert called in ([], ["Oslo"], ["Rome"])


@APIS
def test_tool_whose_result_is_answered(api: str) -> None:
    asked = agent(api)
    asked.tool_plain(lambda: "noon", name="get_time", description="Return the time.")
    assert ask(asked).output
