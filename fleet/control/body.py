"""What a request to the controller carries."""

import re
from typing import Any

import msgspec
from starlette.requests import Request

from api.errors import QUOTED_CHARACTERS, ApiError, invalid

MOST_BYTES = 4 * 1024 * 1024

_AT = re.compile(r"(.*) - at `\$([^`]*)`", re.DOTALL)
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")


async def read(request: Request, kind: Any) -> Any:
    """It is small, so it is read as a whole; one that grows too long is refused as soon as it does."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise ApiError(413, f"the body is longer than {MOST_BYTES} bytes", code="body_too_large")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise invalid(f"the body cannot be used: {_with_its_value(str(error), bytes(body))}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise invalid(f"the body cannot be used: {error}") from error


def _with_its_value(message: str, body: bytes) -> str:
    """As msgspec says it, with the value as it was written in place of a path alone."""
    found = _AT.fullmatch(message)
    if found is None:
        return message
    said, path = found.groups()
    value = msgspec.Raw(body)
    for name, number in _STEP.findall(path.replace("[...]", "")):
        if name:
            value = msgspec.json.decode(value, type=dict[str, msgspec.Raw])[name]
        else:
            value = msgspec.json.decode(value, type=list[msgspec.Raw])[int(number)]
    written = bytes(value).decode(errors="replace")
    if len(written) > QUOTED_CHARACTERS:
        written = written[: QUOTED_CHARACTERS - 3] + "..."
    return f"{path.removeprefix('.')} is {written}: {said}"
