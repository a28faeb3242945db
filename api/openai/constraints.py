"""The form that an answer must have, from the fields in which clients say it."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import msgspec
from msgspec import Struct

from api.errors import invalid, quoted
from api.openai.constraint_fields import JsonObjectFormat, JsonSchemaFormat, Schema, StructuredOutputs
from api.openai.requests import ChatRequest, SamplingFields

Kind: TypeAlias = Literal["json_schema", "json_object", "regex", "choice", "grammar"]

MAX_BYTES: dict[Kind, int] = {
    "json_schema": 128 * 1024,
    "json_object": 2,
    "regex": 16 * 1024,
    "choice": 64 * 1024,
    "grammar": 16 * 1024,
}
DEFINITIONS = ("$defs", "definitions")  # keys at a schema's root; its references begin with their names


class Constraint(Struct, frozen=True):
    kind: Kind
    text: str  # a schema or a list of strings as JSON, a regular expression or a grammar; empty for json_object


class Asked(NamedTuple):
    constraint: Constraint
    param: str  # the field that asks for it


# ---- the forms that requests ask for


def constraint_of(request: SamplingFields) -> Asked | None:
    """Return the request's constraint; raise ApiError 400 if there are two, or one that cannot be read."""
    calls = _of_tools(request)
    form, formats = request.response_format, list[Asked]()
    if isinstance(form, JsonObjectFormat) and not calls:  # it is that of a text
        formats = [Asked(Constraint("json_object", ""), "response_format")]
    elif isinstance(form, JsonSchemaFormat) and not calls:
        formats = [_of_schema(form.json_schema.schema, "response_format.json_schema.schema")]
    guided = _of_fields(request, "guided_", ("json", "regex", "choice", "grammar"), "guided_")
    asked = [*formats, *_of_structured(request.structured_outputs), *guided, *calls]
    if len(asked) > 1:
        first, second = asked[0].param, asked[1].param
        raise invalid(f"{first} and {second} are both set; an answer has one form: leave one of them out", second)
    if not asked:
        return None
    [(constraint, param)] = asked
    size, limit = len(constraint.text.encode(errors="replace")), MAX_BYTES[constraint.kind]
    if size > limit:
        raise invalid(f"{param} has {size} bytes; a {constraint.kind} may have {limit}: shorten it", param)
    return asked[0]


def _of_structured(asked: StructuredOutputs | None) -> list[Asked]:
    if asked is None:
        return []
    field = "structured_outputs"
    if asked.structural_tag is not None:
        raise invalid(f"{field}.structural_tag is not supported; use json or grammar", f"{field}.structural_tag")
    found = _of_fields(asked, field + ".", ("json", "regex", "choice", "grammar"))
    if asked.json_object:
        found.append(Asked(Constraint("json_object", ""), f"{field}.json_object"))
    if not found:
        raise invalid(f"{field} sets none of json, regex, choice, grammar and json_object; set one of them", field)
    return found


def _of_fields(fields: Struct, shown: str, names: Sequence[str], prefix: str = "") -> list[Asked]:
    found: list[Asked] = []
    for name in names:
        value = getattr(fields, prefix + name)
        if value is None:
            continue
        param = shown + name
        if name == "json":
            found.append(_of_schema(value, param))
        elif name == "choice":
            found.append(Asked(Constraint("choice", msgspec.json.encode(value).decode()), param))
        elif not value:
            raise invalid(f"{param} is empty; write one, or leave it out", param)
        else:
            found.append(Asked(Constraint(cast(Kind, name), value), param))
    return found


def _of_schema(schema: Schema | str, param: str) -> Asked:
    if isinstance(schema, str):
        try:
            decoded = msgspec.json.decode(schema)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
            raise invalid(f"{param} is {quoted(schema)}, which is not JSON: {error}", param) from None
        if not isinstance(decoded, dict):
            raise invalid(f"{param} is {quoted(schema)}; a schema must be an object", param)
        schema = decoded
    return Asked(Constraint("json_schema", msgspec.json.encode(schema).decode()), param)


# ---- tools


def _of_tools(request: SamplingFields) -> list[Asked]:
    choice = getattr(request, "tool_choice", None)  # completions have none
    if choice is None or choice in ("none", "auto"):
        return []
    tools = [tool["function"] for tool in cast(ChatRequest, request).tools]
    most = None if cast(ChatRequest, request).parallel_tool_calls else 1
    if choice == "required":
        if not tools:
            raise invalid('tool_choice is "required" and there are no tools; send some', "tool_choice")
        return [_of_schema(calls_schema(tools, most), "tools")]
    by_name = {tool["name"]: tool for tool in reversed(tools)}
    if missing := [name for name in choice.names if name not in by_name]:
        raise invalid(f"tool_choice names the function {quoted(missing[0])}; no tool has this name", "tool_choice")
    if not choice.is_forced:
        return []
    chosen = [by_name[name] for name in choice.names]
    return [_of_schema(_parameters(chosen[0]) if choice.type == "function" else calls_schema(chosen, most), "tools")]


def calls_schema(tools: Sequence[Mapping[str, Any]], most: int | None = None) -> Schema:
    """Return the schema of a list of calls, each with a name and the parameters of that function, as vLLM has it.

    After the last of `most` calls the list ends, and with it the answer.
    """
    definitions: dict[str, Schema] = {}
    calls: list[Schema] = []
    for tool in tools:
        parameters = dict(_parameters(tool))
        for key in DEFINITIONS:
            # They move to the root of the schema of all tools, where references look for them.
            together, own = definitions.setdefault(key, {}), parameters.pop(key, None)
            for name, definition in (own if isinstance(own, dict) else {}).items():
                if together.setdefault(name, definition) != definition:
                    both = f"two tools define {key}.{name} differently, the second is {quoted(tool['name'])}"
                    raise invalid(f"{both}; rename one", "tools")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool["name"]}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: Schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if most is not None:
        schema["maxItems"] = most
    return schema | {key: found for key, found in definitions.items() if found}


def _parameters(tool: Mapping[str, Any]) -> Schema:
    parameters: Schema | None = tool.get("parameters")
    return {"type": "object", "properties": {}} if parameters is None else parameters
