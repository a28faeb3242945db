"""Values between tags become JSON of the types that the tool's schema names, as vLLM's parsers have it."""

import json
from typing import Any

import pytest

from api.parsing.xml_calls import MAX_DEPTH, MAX_VALUE, typed, types_of
from tests.api.parsing.parsers import calls_in, parser_of, said

QWEN = "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"
INT, NUMBER, BOOL = {"type": "integer"}, {"type": "number"}, {"type": "boolean"}
STRING_OR_NULL = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize("written", [QWEN, GLM])
@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (INT, "42", 42),
        (INT, "-7", -7),
        (INT, "4.5", 4.5),
        (INT, "many", "many"),
        (INT, "9" * 5000, "9" * 5000),
        (NUMBER, "4.5", 4.5),
        (NUMBER, "4", 4),
        (NUMBER, "nan", "nan"),
        (NUMBER, "1e999", "1e999"),
        (BOOL, "True", True),
        (BOOL, "false", False),
        (BOOL, "1", True),
        (BOOL, "maybe", "maybe"),
        ({"type": "array"}, '["a", 1]', ["a", 1]),
        ({"type": "object"}, '{"b": {"c": null}}', {"b": {"c": None}}),
        ({"type": "object"}, "{'b': 1}", "{'b': 1}"),
        ({"type": "object"}, "[" * 100_000, "[" * 100_000),
        ({"type": "array"}, "[NaN]", "[NaN]"),
        ({"type": "array"}, '["\\ud800"]', ["\ud800"]),
        ({"type": "string"}, "42", "42"),
        ({"type": "string"}, "null", "null"),
        ({"type": ["string", "integer"]}, "42", 42),
        ({"type": ["string", "integer"]}, "x", "x"),
        (STRING_OR_NULL, "null", None),
        (STRING_OR_NULL, "x", "x"),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({}, "42", "42"),
        ({"$ref": "#/$defs/a"}, "42", "42"),
    ],
)
def test_a_value_has_a_type_of_its_schema(written: str, schema: dict[str, Any], text: str, value: Any) -> None:
    for slices in ([written.format(text)], written.format(text)):
        if len(text) > 1000 and len(slices) > 1:
            continue
        parsed = said(parser_of("qwen3_coder" if written is QWEN else "glm45", properties={"a": schema}), slices)
        assert calls_in(parsed) == [("f", {"a": value})]
        assert parsed.content == "" and type(calls_in(parsed)[0][1]["a"]) is type(value)
        parsed.calls[0].arguments.encode()


def test_text_is_passed_on_as_it_comes_and_other_values_when_they_end() -> None:
    parser = parser_of("qwen3_coder", properties={"a": {"type": "string"}, "b": INT})
    pieces = ["<function=f><parameter=a>\nsome", " text\n", "more", "\n</parameter><parameter=b>4", "2</parameter>"]
    told = ["".join(call.arguments for call in parser.feed(piece).calls) for piece in pieces]
    assert told == ['{"a": "some', " text", "\\nmore", '", "b": ', "42"]


def test_a_value_that_is_no_text_is_bounded() -> None:
    parser = parser_of("qwen3_coder", properties={"a": INT})
    parsed = said(parser, ["<function=f><parameter=a>", "1" * (MAX_VALUE + 10)])
    assert parsed.calls[0].arguments == '{"a": ' and len(parsed.content) == 10


def test_types_of_odd_schemas_are_found_in_little_time() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(500):
        schema = {"anyOf": [schema]}
    assert types_of(schema) == {"string"} and MAX_DEPTH < 500
    odd_ones: tuple[Any, ...] = (
        None,
        5,
        {"type": 5},
        {"type": [None, []]},
        {"enum": "x"},
        {"anyOf": {"a": 1}},
        {"anyOf": [3]},
    )
    for odd in odd_ones:
        assert types_of(odd) == {"string"}
    assert json.loads(typed("x", frozenset({"unknown"}))) == "x"
