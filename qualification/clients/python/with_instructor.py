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
CERTAIN = (
    *(Mode.FUNCTIONS, Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA, Mode.JSON_O1),
    *(Mode.RESPONSES_TOOLS, Mode.RESPONSES_TOOLS_WITH_INBUILT_TOOLS),
)
WILLING = pytest.mark.parametrize("mode", [Mode.JSON, Mode.MD_JSON], ids=lambda mode: mode.value)


def of_openai(mode: Mode) -> Any:
    return instructor.from_openai(openai.OpenAI(max_retries=0), mode=mode)


@pytest.mark.parametrize("mode", CERTAIN, ids=lambda mode: mode.value)
def test_mode(mode: Mode) -> None:
    found = of_openai(mode).create(model=MODEL, messages=HELLO, response_model=Person, max_retries=1)
    assert isinstance(found, Person)


@WILLING
def test_mode_that_leaves_the_form_to_the_model(mode: Mode) -> None:
    """The client is to say that what came is no person, and to ask again."""
    with pytest.raises(InstructorRetryException) as caught:
        of_openai(mode).create(model=MODEL, messages=HELLO, response_model=Person, max_retries=2)
    assert caught.value.n_attempts == 3


@WILLING
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


def test_tools_for_anthropic() -> None:
    client: Any = instructor.from_anthropic(anthropic.Anthropic(max_retries=0), mode=Mode.ANTHROPIC_TOOLS)
    found = client.create(model=MODEL, messages=HELLO, response_model=Person, max_retries=1, max_tokens=1000)
    assert isinstance(found, Person)
