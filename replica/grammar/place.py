"""Finds the place in a schema that cannot be compiled: the deepest one that fails for the same reason by itself."""

import json
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from api.openai.constraints import DEFINITIONS

Schema: TypeAlias = dict[str, Any]
Failure: TypeAlias = Callable[[str], str | None]  # why a schema cannot be compiled; None: it can

MOST_TRIES = 200  # compilations to find one place
NAMED = ("properties", "patternProperties", *DEFINITIONS)  # their members are schemas by name
LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE = ("items", "additionalProperties", "additionalItems", "contains", "not", "propertyNames", "if", "then", "else")


def place_of(schema: Schema, reason: str, failure: Failure) -> str:
    """Return the place as a path, `$` for the whole schema."""
    definitions = {key: schema[key] for key in DEFINITIONS if key in schema}
    path, inner, tries = "$", schema, 0
    while True:
        for step, child in _children(inner):
            tries += 1
            if tries > MOST_TRIES:
                return path
            if failure(json.dumps(definitions | child)) == reason:
                path, inner = path + step, child
                break
        else:
            return path


def _children(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """The schemas in a schema, each with its place in it."""
    for key, value in schema.items():
        if key in NAMED and isinstance(value, dict):
            found = [(f".{key}.{name}", child) for name, child in value.items()]
        elif key in LISTED and isinstance(value, list):
            found = [(f".{key}[{index}]", child) for index, child in enumerate(value)]
        else:
            found = [(f".{key}", value)] if key in SINGLE else []
        yield from ((step, child) for step, child in found if isinstance(child, dict))
