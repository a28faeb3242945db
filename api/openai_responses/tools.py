"""The tools of a Responses request as functions, which are all that a model knows, and its calls as the tools' again.

As in vLLM a custom tool is shown as a function of one string, and a tool in a namespace has both names in one. Other
tools are run by OpenAI's servers, or have items of their own: they are not shown.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from api.errors import invalid, quoted

INPUT = "input"
INPUT_SCHEMA = {
    "type": "object",
    "properties": {INPUT: {"type": "string", "description": "The whole input of the tool, as plain text."}},
    "required": [INPUT],
    "additionalProperties": False,
}
SHOWN = ("function", "custom")


class InputFormat(Struct, kw_only=True, omit_defaults=True):
    """The form of a custom tool's input. The model is told of it; its output is not held to it."""

    type: str
    syntax: str | None = None
    definition: str | None = None


class ResponseTool(Struct, kw_only=True, omit_defaults=True):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: InputFormat | None = None  # a custom tool's


class OfferedTool(ResponseTool, kw_only=True, omit_defaults=True):
    tools: list[ResponseTool] | None = None  # a namespace's


class Called(NamedTuple):
    """The tool that a call is for."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


class ShownTool(NamedTuple):
    shown_name: str  # the function's
    called: Called
    tool: ResponseTool

    @property
    def function(self) -> dict[str, Any]:
        tool = self.tool
        description, parameters = tool.description, tool.parameters
        if self.called.is_custom:
            parameters = INPUT_SCHEMA
            if tool.format is not None and (grammar := tool.format.definition):
                follows = f"The input follows this {tool.format.syntax} grammar:\n{grammar}"
                description = f"{description or ''}\n\n{follows}".lstrip()
        fields = {"description": description, "parameters": parameters, "strict": tool.strict}
        given = {name: value for name, value in fields.items() if value is not None}
        return {"type": "function", "function": {"name": self.shown_name} | given}


def check_tools(tools: Sequence[OfferedTool]) -> None:
    for i, tool in enumerate(tools):
        _check_named(tool, (*SHOWN, "namespace"), f"tools[{i}]")
        for j, inner in _inner(tool):
            _check_named(inner, SHOWN, f"tools[{i}].tools[{j}]")


def _check_named(tool: ResponseTool, types: Sequence[str], where: str) -> None:
    if tool.type in types and not tool.name:
        raise invalid(f"{where} is of type {quoted(tool.type)} and has no name; give it one", f"{where}.name")


def shown_tools(tools: Sequence[OfferedTool]) -> Iterator[ShownTool]:
    for tool in tools:
        if tool.type in SHOWN:
            yield _shown(tool, None)
        elif tool.type == "namespace":
            yield from (_shown(inner, tool.name) for _, inner in _inner(tool) if inner.type in SHOWN)


def _inner(tool: OfferedTool) -> Iterator[tuple[int, ResponseTool]]:
    return iter(enumerate(tool.tools or ()) if tool.type == "namespace" else ())


def _shown(tool: ResponseTool, namespace: str | None) -> ShownTool:
    name = tool.name or ""
    return ShownTool(shown_name(name, namespace), Called(name, namespace, tool.type == "custom"), tool)


def shown_name(name: str, namespace: str | None) -> str:
    return name if namespace is None else f"{namespace}__{name}"


def arguments_of(input: str) -> str:
    """The arguments with which a model calls the function of a custom tool."""
    return json.dumps({INPUT: input}, ensure_ascii=False)


class _Arguments(Struct):
    input: str


def input_of(arguments: str) -> str:
    """The input in these arguments; all of them, where they are not those of the function that the model was shown."""
    try:
        return msgspec.json.decode(arguments, type=_Arguments).input
    except (msgspec.DecodeError, RecursionError):
        return arguments
