"""LangChain's models for OpenAI's two APIs."""

import asyncio
import os
from typing import Any, Literal

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=40)
    age: int
    mood: Literal["good", "bad"]


@tool  # type: ignore[untyped-decorator]
def get_weather(city: str, unit: Literal["C", "F"]) -> str:
    """Return the weather."""
    return f"12 {unit} in {city}"


APIS = pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])


def model(responses: bool = False, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(model=os.environ["MODEL"], max_retries=0, timeout=60, use_responses_api=responses, **more)


@APIS
def test_invoke(responses: bool) -> None:
    answer = model(responses).invoke([("system", "Be kind."), ("human", "Hello")])
    assert answer.text and answer.usage_metadata["total_tokens"] > 0


@APIS
def test_stream(responses: bool) -> None:
    pieces = list(model(responses, stream_usage=True).stream("Hello"))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    assert len(pieces) > 2 and whole.text and whole.usage_metadata["output_tokens"] > 0


@APIS
def test_batch(responses: bool) -> None:
    assert all(answer.text for answer in model(responses).batch(["Hello", "World"]))


def test_async() -> None:
    async def ask_both() -> Any:
        """Ask both APIs in one event loop: the client keeps its connections from one to the next."""
        return await asyncio.gather(model().ainvoke("Hello"), model(True).ainvoke("Hello"))

    assert all(answer.text for answer in asyncio.run(ask_both()))


@APIS
@pytest.mark.parametrize("choice", ["any", "get_weather"])
def test_tools(responses: bool, choice: str) -> None:
    bound = model(responses).bind_tools([get_weather], tool_choice=choice)
    answer = bound.invoke("The weather?")
    assert answer.tool_calls and answer.invalid_tool_calls == []
    call = answer.tool_calls[0]
    assert call["name"] == "get_weather" and set(call["args"]) == {"city", "unit"}
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    later = model(responses).bind_tools([get_weather]).invoke([HumanMessage("The weather?"), answer, result])
    assert isinstance(later, AIMessage)


@APIS
def test_strict_tools(responses: bool) -> None:
    bound = model(responses).bind_tools([get_weather], tool_choice="required", strict=True, parallel_tool_calls=False)
    assert len(bound.invoke("The weather?").tool_calls) == 1


@APIS
def test_stream_of_tool_calls(responses: bool) -> None:
    bound = model(responses).bind_tools([get_weather], tool_choice="any")
    whole: Any = None
    for piece in bound.stream("The weather?"):
        whole = piece if whole is None else whole + piece
    assert whole.tool_calls and set(whole.tool_calls[0]["args"]) == {"city", "unit"}


@APIS
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(responses: bool, method: Any) -> None:
    asked = model(responses).with_structured_output(Person, method=method)
    assert isinstance(asked.invoke("A person?"), Person)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_stream_of_structured_output(method: Any) -> None:
    asked = model().with_structured_output(Person, method=method)
    assert isinstance(list(asked.stream("A person?"))[-1], Person)


@APIS
def test_structured_output_by_json_mode(responses: bool) -> None:
    asked = model(responses).with_structured_output(None, method="json_mode")
    assert isinstance(asked.invoke("A person, in JSON?"), dict)


def test_agents_structured_response_by_schema() -> None:
    agent = create_agent(model(), tools=[get_weather], response_format=ProviderStrategy(Person))
    assert isinstance(agent.invoke({"messages": [("human", "A person?")]})["structured_response"], Person)


def test_agents_structured_response_by_tool() -> None:
    agent = create_agent(model(), tools=[], response_format=ToolStrategy(Person))
    assert isinstance(agent.invoke({"messages": [("human", "A person?")]})["structured_response"], Person)


def test_response_after_a_response() -> None:
    chained = model(True, use_previous_response_id=True, store=True)
    first = chained.invoke("Hello")
    assert chained.invoke([HumanMessage("Hello"), first, HumanMessage("And?")]).text


def test_log_probabilities() -> None:
    answer = model(logprobs=True, top_logprobs=2, max_tokens=5).invoke("Hello")
    assert answer.response_metadata["logprobs"]["content"]


def test_completions() -> None:
    llm = OpenAI(model=os.environ["MODEL"], max_retries=0, max_tokens=10)
    assert llm.invoke("Hello")
    assert "".join(llm.stream("Hello"))


def test_embeddings_are_refused() -> None:
    asked = OpenAIEmbeddings(model=os.environ["MODEL"], check_embedding_ctx_length=False, max_retries=0)
    with pytest.raises(Exception, match="404"):
        asked.embed_query("Hello")
