"""The form of an answer, in all fields in which clients say it."""

import json
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import msgspec
import pytest

from api.errors import ApiError
from api.openai.constraints import MAX_BYTES, Asked, Constraint, calls_schema, constraint_of
from api.openai.requests import ChatRequest, read
from tests.api.openai.test_requests import chat, completion, refused_chat, refused_completion

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {}}}
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time"}},
]


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def asked(**fields: Any) -> Asked:
    found = constraint_of(chat(**fields))
    assert found is not None
    return found


def refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        _ = constraint_of(chat(**fields))
    assert caught.value.status == 400
    return caught.value


def test_without_such_a_field_nothing_is_asked_for() -> None:
    for fields in (
        {},
        {"response_format": {"type": "text"}},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "auto"},
        {"tools": TOOLS, "tool_choice": allowed("auto", "time")},
    ):
        assert constraint_of(chat(**fields)) is None
    assert constraint_of(chat(tool_choice="none")) is constraint_of(completion(guided_json=None)) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "s", "strict": True, "schema": SCHEMA},
                }
            },
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}}, "structured_outputs.json"),
        ({"guided_json": SCHEMA}, "guided_json"),
        ({"guided_json": json.dumps(SCHEMA)}, "guided_json"),
    ],
    ids=str,
)
def test_a_schema_keeps_its_order(fields: dict[str, Any], param: str) -> None:
    assert asked(**fields) == Asked(Constraint("json_schema", json.dumps(SCHEMA, separators=(",", ":"))), param)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a"}},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "time"}}},
        {"tools": TOOLS, "tool_choice": allowed("required", "time")},
    ],
    ids=str,
)
def test_a_body_that_the_router_writes_anew_asks_for_the_same(fields: dict[str, Any]) -> None:
    request = chat(**fields)
    assert constraint_of(read(msgspec.json.encode(request), ChatRequest)) == constraint_of(request) is not None


@pytest.mark.parametrize(
    ("name", "value", "text"), [("regex", "a+", "a+"), ("choice", ["a", "b"], '["a","b"]'), ("grammar", "g", "g")]
)
def test_both_names_of_vllm_mean_the_same(name: Any, value: object, text: str) -> None:
    for fields in ({"structured_outputs": {name: value}}, {f"guided_{name}": value}):
        assert asked(**fields).constraint == Constraint(name, text)
        found = constraint_of(completion(**fields))
        assert found is not None and found.constraint == Constraint(name, text)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "one form"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice", "both set"),
        ({"structured_outputs": {}}, "structured_outputs", "sets none of"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "not supported"),
        ({"guided_json": "{"}, "guided_json", "not JSON"),
        ({"guided_json": "[1]"}, "guided_json", "must be an object"),
        ({"guided_regex": ""}, "guided_regex", "empty"),
        ({"guided_regex": "x" * (MAX_BYTES["regex"] + 1)}, "guided_regex", f"{MAX_BYTES['regex'] + 1} bytes"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": TOOLS}, "tool_choice", '"f"'),
        ({"tool_choice": "required", "tools": TOOLS, "guided_regex": "a"}, "tools", "both set"),
        ({"tool_choice": allowed("required", "time", "f"), "tools": TOOLS}, "tool_choice", '"f"'),
        ({"tool_choice": allowed("auto", "f"), "tools": TOOLS}, "tool_choice", '"f"'),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused(fields: dict[str, Any], param: str, message: str) -> None:
    error = refused(**fields)
    assert error.param == param and message in error.message


def test_what_cannot_be_read_is_refused() -> None:
    assert refused_chat(response_format={"type": "xml"}).param == "response_format.type"
    assert refused_chat(response_format={"type": "json_schema"}).param == "response_format.json_schema"
    assert refused_chat(tool_choice="any").param == "tool_choice"
    assert refused_chat(tool_choice={"type": "allowed_tools"}).param == "tool_choice.allowed_tools"
    assert refused_chat(tool_choice={"type": "function"}).param == "tool_choice.function"
    assert refused_completion(guided_choice=[]).param == "guided_choice"


def test_required_tools_are_a_list_of_calls() -> None:
    found = asked(tools=TOOLS, tool_choice="required")
    schema = json.loads(found.constraint.text)
    call = {"name": "weather", "parameters": {"city": "Rome"}}
    jsonschema.validate([call, {"name": "time", "parameters": {}}], schema)
    for wrong in ([], call, [call | {"name": "time2"}], [{"name": "weather", "parameters": {}}], [{"name": "weather"}]):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
    assert found.param == "tools"


def test_a_named_function_gives_its_arguments_alone() -> None:
    for name, expected in (("weather", WEATHER), ("time", {"type": "object", "properties": {}})):
        found = asked(tools=TOOLS, tool_choice={"type": "function", "function": {"name": name}})
        assert json.loads(found.constraint.text) == expected


def test_required_tools_that_are_allowed_are_a_list_of_calls_of_these() -> None:
    schema = json.loads(asked(tools=TOOLS, tool_choice=allowed("required", "time")).constraint.text)
    jsonschema.validate([{"name": "time", "parameters": {}}], schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate([{"name": "weather", "parameters": {"city": "Rome"}}], schema)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "time"}}], ids=str)
def test_an_answer_that_is_calls_has_no_text_for_a_response_format(choice: object) -> None:
    """As OpenAI and vLLM have it, and as clients send it that ask for an object by a tool."""
    calls = asked(tools=TOOLS, tool_choice=choice)
    for format in ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": SCHEMA}}):
        assert asked(tools=TOOLS, tool_choice=choice, response_format=format) == calls
        assert asked(tools=TOOLS, tool_choice="auto", response_format=format) != calls


def test_definitions_of_tools_are_found_from_the_root() -> None:
    def tool(name: str, definition: object) -> dict[str, Any]:
        parameters = {"type": "object", "properties": {"x": {"$ref": "#/$defs/x"}}, "$defs": {"x": definition}}
        return {"name": name, "parameters": parameters}

    schema = calls_schema([tool("a", {"type": "integer"}), tool("b", {"type": "integer"})])
    jsonschema.validate([{"name": "b", "parameters": {"x": 1}}], schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate([{"name": "b", "parameters": {"x": "1"}}], schema)
    with pytest.raises(ApiError, match=r"\$defs\.x differently, the second is .b."):
        calls_schema([tool("a", {"type": "integer"}), tool("b", {"type": "string"})])


@pytest.mark.parametrize("choice", ["required", allowed("required", "time")])
@pytest.mark.parametrize("parallel", [True, False])
def test_one_call_at_most_is_part_of_the_form(choice: Any, parallel: bool) -> None:
    found = asked(tools=TOOLS, tool_choice=choice, parallel_tool_calls=parallel)
    assert json.loads(found.constraint.text).get("maxItems") == (None if parallel else 1)
