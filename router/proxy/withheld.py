"""Fields that clients may not set: hosts that an engine connects to, and, beside classes, an order of their own."""

from functools import cache
from typing import Any

import msgspec
from msgspec import Raw, Struct

from api.errors import invalid
from router.prompts.prompt import UNREADABLE, lenient

WITHHELD = ("kv_transfer_params", "ec_transfer_params")
PRIORITY = "priority"  # with classes the router reads it
_ESCAPE = b"\\u00"  # or they are spelled with escapes
_MARKS = dict.fromkeys(WITHHELD, b"_transfer_params") | {PRIORITY: b'"priority"'}


class _Ordered(Struct):
    priority: Any = None


_decode_ordered = msgspec.json.Decoder(_Ordered).decode
_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode


def may_have_withheld(body: bytes | bytearray, names: tuple[str, ...] = WITHHELD) -> bool:
    """Tell whether it takes parsing to see that none of these fields is there."""
    return any(mark in body for mark in _marks_of(names))


@cache
def _marks_of(names: tuple[str, ...]) -> tuple[bytes, ...]:
    return tuple({_MARKS[name] for name in names} | {_ESCAPE}) if names else ()


def priority_in(body: bytes) -> int | None:
    """The priority that a client asks for; None: it asks for none, or in no way that can be read."""
    if not may_have_withheld(body, (PRIORITY,)):
        return None
    try:
        found: int | None = lenient(_decode_ordered(body).priority, int)
        return found
    except UNREADABLE:
        return None


def without_withheld(body: bytes, names: tuple[str, ...] = WITHHELD) -> bytes:
    """The body without these fields; raise ApiError 400 if it may have some and cannot be parsed."""
    if not may_have_withheld(body, names):
        return body
    try:
        fields = _decode_fields(body)
    except UNREADABLE as error:
        if not bytes(body[:64]).lstrip().startswith(b"{"):
            return body  # no engine reads fields in it
        why = f"it cannot be read ({error}), and seems to set {names[0]}, which only the router may"
        raise invalid(f"the body is refused: {why}") from None
    if fields.keys().isdisjoint(names):
        return body
    return msgspec.json.encode({name: value for name, value in fields.items() if name not in names})
