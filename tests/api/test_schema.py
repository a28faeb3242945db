from functools import cache
from typing import Any

import jsonschema_rs
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from api.openai.requests import CompletionRequest
from api.schema import ANSWERS, REQUESTS, components, operation, reference
from tests.api.bodies import REQUIRED, bodies, is_read


@cache
def validator(type_: type[Struct]) -> jsonschema_rs.Draft202012Validator:
    return jsonschema_rs.Draft202012Validator(reference(type_) | {"components": {"schemas": components()}})


def test_every_reference_resolves_in_a_valid_schema() -> None:
    for type_ in REQUESTS + ANSWERS:
        validator(type_).is_valid({})
    for schema in components().values():
        jsonschema_rs.meta.validate(schema | {"$schema": "https://json-schema.org/draft/2020-12/schema"})


@given(data=st.data(), request_type=st.sampled_from(REQUESTS))
def test_what_is_read_fits_the_schema(data: st.DataObject, request_type: type[Struct]) -> None:
    value = data.draw(bodies(request_type))
    assert validator(request_type).is_valid(value) or not is_read(request_type, value)


def test_the_schema_says_what_types_and_numbers_can_be_and_no_field_that_is_refused() -> None:
    wrong: list[dict[str, Any]] = [{"prompt": ["a", None]}, {"temperature": -1}, {"n": 200}, {"stream": 1}]
    for fields in wrong:
        assert not validator(CompletionRequest).is_valid(REQUIRED[CompletionRequest] | fields), fields
    assert "suffix" not in components()["CompletionRequest"]["properties"]


def test_an_operation_names_its_body_and_its_answers() -> None:
    found = operation(REQUESTS[0], ANSWERS[0])
    assert found["requestBody"]["content"]["application/json"]["schema"] == reference(CompletionRequest)
    assert set(found["responses"]) == {"200", "default"}
    assert "requestBody" not in operation(None, None)
