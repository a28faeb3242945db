"""Fields that clients may not set: hosts, ranks and sockets of an engine, and, beside classes, an order of their own.

`tests/hostile/test_fields.py` holds the fields of the engines' own schemas against these.
"""

from collections.abc import Collection
from operator import attrgetter
from typing import Any

import msgspec
from msgspec import Raw

from engines import PROFILES
from router.prompts.prompt import UNREADABLE, Peek, lenient, read_peek, unreadable

# From where an engine reads KV; with `pass_kv_transfer_params` clients may say so.
TRANSFER = tuple(name for engine in PROFILES.values() for name in engine.transfer_fields)
PLACING = tuple(name for engine in PROFILES.values() for name in engine.placing_fields)
NESTING = tuple(name for engine in PROFILES.values() for name in engine.nesting_fields)
PRIORITY = "priority"  # with classes the router reads it

_NOTHING = Raw(b"")
_RESERVED = (*TRANSFER, *PLACING, *NESTING)
_FIELDS = [(PRIORITY, Any, None), *((name, Raw, _NOTHING) for name in _RESERVED)]
_decode_asked = msgspec.json.Decoder(msgspec.defstruct("_Asked", [("model", Any, None), *_FIELDS])).decode
_decode_peek = msgspec.json.Decoder(msgspec.defstruct("_Peek", _FIELDS, bases=(Peek,))).decode
_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_reserved_in = attrgetter(*_RESERVED)
_NONE_RESERVED = (_NOTHING,) * len(_RESERVED)


def withhold(body: bytes | bytearray, names: Collection[str]) -> tuple[bytes, str | None, int | None]:
    """The body without these fields, wherever an engine looks for them; the model and the priority that it asks for.

    Raise ApiError 400 unless it is a JSON object. Engines read more, such as UTF-16 and NaN.
    """
    try:
        asked: Any = _decode_asked(body)
    except UNREADABLE as error:
        raise unreadable(error) from None
    model = asked.model if isinstance(asked.model, str) else None
    kept, priority = _without(body, asked, names)
    return kept, model, priority


def peek_withheld(body: bytes, names: Collection[str]) -> tuple[bytes, Peek, int | None]:
    """The body without these fields, and the fields that the router reads, in one reading where nothing is odd."""
    try:
        peek: Any = _decode_peek(body)
    except UNREADABLE:
        body, _, priority = withhold(body, names)
        return body, read_peek(body), priority
    body, priority = _without(body, peek, names)
    return body, peek, priority


def _without(body: bytes | bytearray, asked: Any, names: Collection[str]) -> tuple[bytes, int | None]:
    ordered = asked.priority is not None and PRIORITY in names
    priority: int | None = lenient(asked.priority, int) if ordered else None
    kept: Any = body
    if ordered or _reserved_in(asked) != _NONE_RESERVED:
        fields = _decode_fields(body)
        others = {name: _within(name, value, names) for name, value in fields.items() if name not in names}
        if others != fields:
            kept = msgspec.json.encode(others)
    return kept, priority


def _within(name: str, value: Raw, names: Collection[str]) -> Raw:
    """The value, without these fields if vLLM looks for some of them there."""
    if name not in NESTING:
        return value
    try:
        fields = _decode_fields(value)
    except UNREADABLE:
        return value  # engines refuse what is no object here
    kept = {name: _within(name, one, names) for name, one in fields.items() if name not in names or name == PRIORITY}
    return value if kept == fields else Raw(msgspec.json.encode(kept))
