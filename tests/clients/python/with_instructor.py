"""Instructor, which asks for Pydantic's models in its many modes."""

import asyncio
import os
from collections.abc import Iterable
from typing import Any, Literal

import anthropic
import instructor
import openai
import pytest
from instructor import Mode
from instructor.core.exceptions import InstructorRetryException
from pydantic import BaseModel, Field

MODEL = os.environ["MODEL"]
HELLO: Any = [{"role": "user", "content": "A person?"}]


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=40)
    age: int
    mood: Literal["good", "bad"]


class Place(BaseModel):
    """A place."""

    name: str = Field(max_length=40)


SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": Person.model_json_schema()}}
CERTAIN = (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA, Mode.RESPONSES_TOOLS)


def of_openai(mode: Mode) -> Any:
    return instructor.from_openai(openai.OpenAI(max_retries=0), mode=mode)


@pytest.mark.parametrize("mode", CERTAIN, ids=lambda mode: mode.value)
def test_mode(mode: Mode) -> None:
    found = of_openai(mode).create(model=MODEL, messages=HELLO, response_model=Person, max_retries=1)
    assert isinstance(found, Person)


def test_json_mode() -> None:
    """Any object is JSON, so the client is to say that this one is no person."""
    with pytest.raises(InstructorRetryException) as caught:
        of_openai(Mode.JSON).create(model=MODEL, messages=HELLO, response_model=Person, max_retries=2)
    assert caught.value.n_attempts == 3
    assert "validation error" in str(caught.value)


def test_markdown_json_mode() -> None:
    with pytest.raises(InstructorRetryException):
        of_openai(Mode.MD_JSON).create(model=MODEL, messages=HELLO, response_model=Person, max_retries=2)


@pytest.mark.parametrize("mode", [Mode.JSON, Mode.MD_JSON], ids=lambda mode: mode.value)
def test_mode_with_a_schema_of_its_own(mode: Mode) -> None:
    """A form that the request's further fields name."""
    found = of_openai(mode).create(
        model=MODEL,
        messages=HELLO,
        response_model=Person,
        max_retries=1,
        extra_body={"response_format": SCHEMA},
    )
    assert isinstance(found, Person)


def test_parallel_tools() -> None:
    found = of_openai(Mode.PARALLEL_TOOLS).create(
        model=MODEL,
        messages=HELLO,
        response_model=Iterable[Person | Place],
        max_retries=1,
        extra_body={"tool_choice": "required"},
    )
    assert all(isinstance(one, Person | Place) for one in found)


def test_completion_beside_the_model() -> None:
    found, completion = of_openai(Mode.TOOLS).create_with_completion(
        model=MODEL, messages=HELLO, response_model=Person, max_retries=1
    )
    assert isinstance(found, Person) and completion.usage.total_tokens > 0


@pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.JSON_SCHEMA], ids=lambda mode: mode.value)
def test_stream_of_a_partial_model(mode: Mode) -> None:
    seen = list(of_openai(mode).create_partial(model=MODEL, messages=HELLO, response_model=Person, max_retries=1))
    assert seen and seen[-1].mood in ("good", "bad")


@pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.JSON_SCHEMA], ids=lambda mode: mode.value)
def test_list_of_models(mode: Mode) -> None:
    found = of_openai(mode).create(model=MODEL, messages=HELLO, response_model=list[Person], max_retries=1)
    assert all(isinstance(one, Person) for one in found)


def test_async() -> None:
    client = instructor.from_openai(openai.AsyncOpenAI(max_retries=0), mode=Mode.TOOLS)
    asked = client.create(model=MODEL, messages=HELLO, response_model=Person, max_retries=1)
    assert isinstance(asyncio.run(asked), Person)


@pytest.mark.parametrize("mode", [Mode.ANTHROPIC_TOOLS], ids=lambda mode: mode.value)
def test_mode_for_anthropic(mode: Mode) -> None:
    client: Any = instructor.from_anthropic(anthropic.Anthropic(max_retries=0), mode=mode)
    found = client.create(model=MODEL, messages=HELLO, response_model=Person, max_retries=1, max_tokens=1000)
    assert isinstance(found, Person)
