"""The fields of the four APIs, and the kinds of items in their lists, as the official clients' own types name them."""

from collections.abc import Iterator
from importlib import import_module
from pkgutil import resolve_name
from types import UnionType
from typing import Any, Literal, Required, Union, get_args, get_origin

from typing_extensions import get_type_hints, is_typeddict

from api.generation_apis import APIS

REQUIRED: Any = Required
CLIENTS = ("openai", "anthropic")  # the packages that name the fields
PARAMETERS: dict[str, tuple[str, ...]] = {
    "chat": ("openai.types.chat.completion_create_params.CompletionCreateParamsStreaming",),
    "completions": ("openai.types.completion_create_params.CompletionCreateParamsStreaming",),
    "responses": ("openai.types.responses.response_create_params.ResponseCreateParamsStreaming",),
    "messages": (
        "anthropic.types.message_create_params.MessageCreateParamsStreaming",
        "anthropic.types.beta.message_create_params.MessageCreateParamsStreaming",
    ),
}
IN_HEADERS = {"betas"}  # which the client does not put into the body
KINDS: dict[tuple[str, str], str] = {
    ("chat", "messages[].content[]"): "openai.types.chat.ChatCompletionContentPartParam",
    ("chat", "tools[]"): "openai.types.chat.ChatCompletionToolUnionParam",
    ("responses", "input[]"): "openai.types.responses.ResponseInputItemParam",
    ("responses", "input[].content[]"): "openai.types.responses.ResponseInputContentParam",
    ("responses", "tools[]"): "openai.types.responses.ToolParam",
    ("messages", "messages[].content[]"): "anthropic.types.ContentBlockParam",
    ("messages", "tools[]"): "anthropic.types.ToolUnionParam",
}

# What an example needs besides, to be one that makes sense.
BESIDES: dict[str, dict[str, Any]] = {
    "function_call": {"arguments": "{}"},
    "function_call_output": {"call_id": "x"},
    "document": {"source": {"type": "text", "media_type": "text/plain", "data": "x"}},
}


def resolved(name: str) -> Any:
    """Import a client's type, Anthropic's first: of two choices that differ in order alone, typing keeps the first."""
    import_module("anthropic.types")
    return resolve_name(name)


def hints(api: str) -> dict[str, Any]:
    """The types of the fields that the API's client sends."""
    found: dict[str, Any] = {}
    for parameters in PARAMETERS[api]:
        found |= get_type_hints(resolved(parameters))
    return {name: hint for name, hint in found.items() if name not in IN_HEADERS}


def fields(api: str) -> list[str]:
    """The client's fields, and those that our requests add to them."""
    return sorted({*hints(api), *APIS[api].request_type.__struct_fields__})


def kinds(union: Any) -> Iterator[tuple[str, Any]]:
    """The name and an example of each kind."""
    for kind in _members(union):
        if is_typeddict(kind):
            example = minimal(kind)
            name = str(example.get("type") or kind.__name__)
            yield name, example | BESIDES.get(name, {})


def minimal(hint: Any) -> Any:
    """A small value of this type: required fields only, and the first of several choices."""
    if is_typeddict(hint):
        named = get_type_hints(hint, include_extras=True)
        return {name: minimal(one) for name, one in sorted(named.items()) if get_origin(one) is REQUIRED}
    origin: Any = get_origin(hint)
    arguments: tuple[Any, ...] = get_args(hint)
    if origin is Literal:
        return arguments[0]
    if origin in (Union, UnionType):
        return minimal(next(one for one in arguments if one is not type(None)))
    if isinstance(origin, type):
        return {} if issubclass(origin, dict) or len(arguments) == 2 else [minimal(arguments[0])]
    if arguments:  # Required and Annotated
        return minimal(arguments[0])
    return {str: "x", int: 1, float: 1.0, bool: True}.get(hint, {})


def _members(union: Any) -> Iterator[Any]:
    for one in get_args(union):
        if get_origin(one) in (Union, UnionType):
            yield from _members(one)
        else:
            yield one
