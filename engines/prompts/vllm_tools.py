"""Tools and their calls as vLLM hands them to a template, each with a description of its shape."""

import json
from collections.abc import Mapping
from typing import Any

from api.errors import invalid


def described_tools(tools: list[Any] | None) -> tuple[list[dict[str, Any]], list[str] | None]:
    """The tools with all fields of the engine's type, set or not, and a description of each."""
    if tools is None:
        return [], None
    if not tools:
        raise invalid("tools is empty, which the engine refuses", "tools")
    made: list[dict[str, Any]] = []
    kinds: list[str] = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type", "function") != "function":
            raise invalid("a tool is no function", "tools")
        shown, kind = _tool(function, tool.get("defer_loading"))
        made.append(shown)
        kinds.append(kind)
    return made, kinds


def _tool(function: dict[str, Any], deferred: Any) -> tuple[dict[str, Any], str]:
    """A tool with null for a description or parameters that it does not have, and a description of it."""
    get = function.get
    name, description, parameters, strict = get("name"), get("description"), get("parameters"), get("strict")
    inner = deferred if get("defer_loading") is None else get("defer_loading")
    for what, value, type in (
        ("name", name, str),
        ("description", description, str),
        ("parameters", parameters, dict),
        ("strict", strict, bool),
        ("defer_loading", inner, bool),
    ):
        if not isinstance(value, type) and (value is not None or what == "name"):
            raise invalid(f"a tool's {what} is of another type than the engine's", "tools")
    shown = {"name": name, "description": description, "parameters": parameters}
    kind = f"function{'' if description is None else '+description'}{'' if parameters is None else '+parameters'}"
    if strict is not None:
        shown["strict"], kind = strict, f"{kind}+strict"
    if inner is not None:
        shown["defer_loading"], kind = inner, f"{kind}+defer_loading"
    made: dict[str, Any] = {"type": "function", "function": shown}
    if deferred is not None:
        made["defer_loading"] = deferred
    return made, kind


def described_calls(calls: Any, kinds: list[str], checked: bool) -> list[dict[str, Any]]:
    """An assistant's calls with parsed arguments, their fields in the order of the engine's types."""
    made = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function") if isinstance(call, dict) else None
        if not (isinstance(function, dict) and call.get("type") == "function" and isinstance(call.get("id"), str)):
            raise invalid("a tool call is no call of a function with an id", "messages")
        if not isinstance(function.get("name"), str) or not isinstance(function.get("arguments"), str):
            raise invalid("a tool call has no name, or arguments that are no text", "messages")
        try:
            arguments = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError):
            arguments = {}
        if not isinstance(arguments, dict):
            arguments = {}
        named = {"arguments": arguments, "name": function["name"]}
        if not checked:
            named = {"name": function["name"], "arguments": arguments}
        made.append(
            {"id": call["id"], "function": named | _others(function, named), "type": "function"}
            | _others(call, ("id", "function", "type"))
        )
        extra = sorted({*made[-1]["function"], *made[-1]} - {"id", "function", "type", "arguments", "name"})
        kinds.append("+".join(["call", *extra]))
    kinds[:] = [*sorted(set(kinds)), *(["several"] if len(made) > 1 else [])]
    return made


def _others(given: Mapping[str, Any], known: Any) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name not in known}
