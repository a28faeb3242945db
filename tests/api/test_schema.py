import json
from functools import cache
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from api.errors import ApiError
from api.openai.requests import ChatRequest, CompletionRequest, read
from api.openai_responses.requests import ResponsesRequest
from api.schema import ANSWERS, REQUESTS, components, operation, reference
from tests.api.bodies import REQUIRED, VALUES, bodies

# What no schema can say: one field's value or length depends on another's.
BEYOND_SCHEMA = frozenset({"n", "min_tokens", "prompt_token_ids", "continue_final_message", "mcp_servers"})


def beyond_schema(request_type: type[Struct]) -> frozenset[str]:
    """The fields of which a schema cannot say everything; tools of responses need a name by their type."""
    return BEYOND_SCHEMA | {"tools"} if request_type is ResponsesRequest else BEYOND_SCHEMA


@cache
def validator(type_: type[Struct]) -> jsonschema_rs.Draft202012Validator:
    return jsonschema_rs.Draft202012Validator(reference(type_) | {"components": {"schemas": components()}})


def accepts(type_: type[Struct], value: Any) -> bool:
    return validator(type_).is_valid(value)


def is_read(type_: type[Struct], value: Any) -> bool:
    try:
        read(json.dumps(value).encode(), type_)
    except ApiError:
        return False
    return True


@pytest.mark.parametrize("name", sorted(components()))
def test_every_schema_is_one(name: str) -> None:
    jsonschema_rs.meta.validate(components()[name] | {"$schema": "https://json-schema.org/draft/2020-12/schema"})


def test_every_reference_resolves() -> None:
    for type_ in REQUESTS + ANSWERS:
        assert type_.__name__ in components()
        accepts(type_, {})


@pytest.mark.parametrize("request_type", REQUESTS)
def test_the_schema_knows_every_field_as_it_is_read(request_type: type[Struct]) -> None:
    for name in request_type.__struct_fields__:
        for value in VALUES if name not in beyond_schema(request_type) else ():
            body = REQUIRED[request_type] | {name: value}
            assert accepts(request_type, body) == is_read(request_type, body), body


@given(data=st.data(), request_type=st.sampled_from(REQUESTS))
def test_the_schema_accepts_what_is_read_and_nothing_else(data: st.DataObject, request_type: type[Struct]) -> None:
    value = data.draw(bodies(request_type, without=beyond_schema(request_type)))
    assert accepts(request_type, value) == is_read(request_type, value)


@given(data=st.data(), request_type=st.sampled_from(REQUESTS))
def test_what_is_read_fits_the_schema(data: st.DataObject, request_type: type[Struct]) -> None:
    value = data.draw(bodies(request_type))
    assert accepts(request_type, value) or not is_read(request_type, value)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ["a", 1]},
        {"prompt": []},
        {"prompt": ["a"] * 1025},
        {"suffix": "x"},
        {"max_tokens": 0},
        {"echo": True, "stream": True, "logprobs": 0},
        {"logit_bias": {"a": 1}},
        {"stream_options": {}},
        {"temperature": -1},
    ],
)
def test_the_schema_says_the_rules_that_msgspec_does_not(fields: dict[str, Any]) -> None:
    assert not accepts(CompletionRequest, {"model": "demo", "prompt": "a"} | fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "tool", "content": None}]},
        {"top_logprobs": 1},
        {"echo": True},
        {"continue_final_message": True, "add_generation_prompt": True},
    ],
)
def test_the_schema_says_the_rules_of_a_chat(fields: dict[str, Any]) -> None:
    assert not accepts(ChatRequest, {"model": "demo", "messages": [{"role": "user", "content": "a"}]} | fields)


def test_an_operation_names_its_body_and_its_answers() -> None:
    found = operation(REQUESTS[0], ANSWERS[0])
    assert found["requestBody"]["content"]["application/json"]["schema"] == reference(CompletionRequest)
    assert set(found["responses"]) == {"200", "default"}
    assert "requestBody" not in operation(None, None)
