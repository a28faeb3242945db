import json

import pytest

from replica.grammar.compiler import NotCompiled, matcher_of, schema_grammar
from replica.grammar.trial import MAX_TRIES, Schema, place_of
from tests.replica.grammar.constraints import compiler


def failure(schema: str) -> str | None:
    try:
        matcher_of(compiler().tokenizer, schema_grammar(schema))
    except NotCompiled as error:
        return str(error)
    return None


WRONG = {"type": "strin"}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (WRONG, "$"),
        ({"type": "object", "properties": {"a": {}, "b": WRONG}}, "$.properties.b"),
        ({"type": "array", "items": {"anyOf": [{"type": "null"}, WRONG]}}, "$.items.anyOf[1]"),
        ({"$defs": {"x": WRONG}, "properties": {"a": {"$ref": "#/$defs/x"}}}, "$.$defs.x"),
        ({"type": "object", "additionalProperties": {"items": WRONG, "type": "array"}}, "$.additionalProperties.items"),
        ({"type": "object", "properties": {"a": True, "b": {"prefixItems": [{}, WRONG], "type": "array"}}},
         "$.properties.b.prefixItems[1]"),
    ],
    ids=str,
)  # fmt: skip
def test_the_place_is_the_deepest_that_fails_alike(schema: Schema, place: str) -> None:
    reason = failure(json.dumps(schema))
    assert reason is not None and "strin" in reason
    assert place_of(schema, reason, failure) == place


def test_the_search_ends() -> None:
    tries: list[str] = []
    wide: Schema = {"properties": {str(number): {} for number in range(10 * MAX_TRIES)}}
    assert place_of(wide, "a reason", lambda schema: tries.append(schema)) == "$"
    assert len(tries) == MAX_TRIES
