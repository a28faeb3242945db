"""LangChain's model for Anthropic's API."""

import asyncio
import os
from typing import Any, Literal

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ToolStrategy
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from pydantic import BaseModel


class Person(BaseModel):
    """A person."""

    name: str  # without a limit: Anthropic's client leaves limits out of schemas that it sends
    age: int
    mood: Literal["good", "bad"]


@tool  # type: ignore[untyped-decorator]
def get_weather(city: str, unit: Literal["C", "F"]) -> str:
    """Return the weather."""
    return f"12 {unit} in {city}"


def model(**more: Any) -> ChatAnthropic:
    return ChatAnthropic(model=os.environ["MODEL"], max_retries=0, timeout=60, **{"max_tokens": 1000, **more})


def test_invoke() -> None:
    answer = model().invoke([("system", "Be kind."), ("human", "Hello")])
    assert answer.text and answer.usage_metadata["total_tokens"] > 0


def test_stream() -> None:
    pieces = list(model().stream("Hello"))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    assert len(pieces) > 2 and whole.text and whole.usage_metadata["output_tokens"] > 0


def test_batch_and_async() -> None:
    assert all(answer.text for answer in model(max_tokens=20).batch(["Hello", "World"]))
    assert asyncio.run(model(max_tokens=20).ainvoke("Hello")).text


@pytest.mark.parametrize("choice", ["any", "get_weather"])
def test_tools(choice: str) -> None:
    answer = model().bind_tools([get_weather], tool_choice=choice).invoke("The weather?")
    assert answer.tool_calls and answer.invalid_tool_calls == []
    call = answer.tool_calls[0]
    assert call["name"] == "get_weather" and set(call["args"]) == {"city", "unit"}
    said = [HumanMessage("The weather?"), answer, get_weather.invoke(call)]
    assert isinstance(model().bind_tools([get_weather]).invoke(said), AIMessage)


def test_stream_of_tool_calls() -> None:
    whole: Any = None
    for piece in model().bind_tools([get_weather], tool_choice="any").stream("The weather?"):
        whole = piece if whole is None else whole + piece
    assert whole.tool_calls and set(whole.tool_calls[0]["args"]) == {"city", "unit"}


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(method: Any) -> None:
    assert isinstance(model().with_structured_output(Person, method=method).invoke("A person?"), Person)


def test_agents_structured_response_by_tool() -> None:
    agent = create_agent(model(), tools=[], response_format=ToolStrategy(Person))
    assert isinstance(agent.invoke({"messages": [("human", "A person?")]})["structured_response"], Person)


def test_count_of_tokens() -> None:
    assert model().get_num_tokens_from_messages([HumanMessage("Hello")]) > 0
