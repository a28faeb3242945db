"""Reads a body into a request type, raising nothing but ApiError for any bytes."""

import re
from collections.abc import Iterable
from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from api.errors import ApiError, invalid, quoted

RequestType = TypeVar("RequestType", bound=Struct)

# How msgspec ends its messages: where it happened. Before it may stand what the client wrote, so only the end counts.
_WHERE = re.compile(r" - at (?P<key>`key` in )?`\$(?P<path>[^`]*)`\Z")
_MISSING = re.compile(r"Object missing required field `(.+)`")
_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]")
_EXPECTED = {  # msgspec says only that the value is not one of them
    "role": "one of system, developer, user, assistant, tool",
    "type": '"text" for a part of a message and "function" for a tool; nothing else is supported',
}
_UNKNOWN = object()
_PART_TYPE = re.compile(r"messages\[\d+\]\.content\[\d+\]\.type")
_MEDIA = re.compile(r"(input_)?(image|audio|video|file)(_\w+)?")


def read(body: bytes, request_type: type[RequestType]) -> RequestType:
    """The request; raise ApiError 400 that names the field."""
    try:
        request: RequestType = _decoder(request_type).decode(body)
    except msgspec.ValidationError as error:
        raise _wrong_field(body, str(error)) from None
    except RecursionError:
        raise invalid("the body is nested too deeply; flatten it") from None
    except UnicodeDecodeError as error:
        raise invalid(f"the body is not UTF-8 ({error.reason}); encode it as UTF-8") from None
    except msgspec.DecodeError as error:
        reason = str(error)
        # msgspec says "truncated" for half a surrogate pair too.
        if "truncated" in reason:
            reason = "it, or a \\u escape in it, is cut short"
        raise invalid(f"the body is not valid JSON: {reason.removeprefix('JSON is malformed: ')}") from None
    return request


def converted(fields: dict[str, Any], request_type: type[RequestType]) -> RequestType:
    """The request with these fields, which come from a request of another type; raise ApiError 400."""
    try:
        return msgspec.convert(fields, request_type)
    except msgspec.ValidationError as error:
        raise invalid(f"the request cannot be answered as a chat: {_lower_first(str(error))}") from None
    except RecursionError:
        raise invalid("the body is nested too deeply; flatten it") from None


@cache
def _decoder(request_type: type[RequestType]) -> msgspec.json.Decoder[RequestType]:
    return msgspec.json.Decoder(request_type)


def _wrong_field(body: bytes, message: str) -> ApiError:
    where = _WHERE.search(message)
    text = message[: where.start()] if where else message
    path = where["path"].lstrip(".") if where else ""
    if missing := _MISSING.fullmatch(text):
        param = f"{path}.{missing[1]}".lstrip(".")
        return invalid(f"{param} is missing; it is required", param)
    param = path.partition("[...]")[0]  # [...] stands for any value of a mapping
    if where is None or not param:
        return invalid(f"the body is not a request: {_lower_first(text)}")
    found = _at(body, param)
    if _PART_TYPE.fullmatch(param) and isinstance(found, str) and _MEDIA.fullmatch(found):
        model = quoted(_at(body, "model"))
        what = f"{param} is {quoted(found)}, and {model} is not a multimodal model"
        return invalid(f"{what}; send text, or ask another model", param, "unsupported")
    if text.startswith("Invalid enum value"):
        text = f"expected {_EXPECTED.get(param.rpartition('.')[2], 'another value')}"
    is_within = param != path or where["key"] is not None
    wrong = f"is {quoted(found)}{', and something in it is wrong' if is_within else ''}"
    return invalid(f"{param} {'cannot be read' if found is _UNKNOWN else wrong}; {_lower_first(text)}", param)


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def _at(body: bytes, path: str) -> object:
    try:
        value = msgspec.json.decode(body)
        for name, index in _STEP.findall(path):
            value = value[name] if name else value[int(index)]
    except (ValueError, RecursionError, LookupError, TypeError):
        return _UNKNOWN  # a number out of range somewhere, or a key that occurs twice
    return value


def media_type(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The type in the only Content-Type, in small letters; empty for none, and for several, of which any may count."""
    types = [value for name, value in headers if name == b"content-type"]
    # Byte for byte (RFC 9110, 8.3.1): `str.strip` removes more than blanks.
    return types[0].partition(b";")[0].strip(b" \t").lower() if len(types) == 1 else b""
