"""Fields that clients may not set: hosts, ranks and sockets of an engine, and, beside classes, an order of their own.

`tests/hostile/test_fields.py` holds the fields of the engines' own schemas against these.
"""

import re
from collections.abc import Collection
from operator import attrgetter
from typing import Any

import msgspec
from msgspec import Raw

from api.errors import invalid, quoted
from engines import PROFILES
from router.prompts.prompt import UNREADABLE, Peek, lenient, unreadable

# An engine reads KV from where these say; with `pass_kv_transfer_params` clients may set them.
TRANSFER = tuple(name for engine in PROFILES.values() for name in engine.transfer_fields)
PLACING = tuple(name for engine in PROFILES.values() for name in engine.placing_fields)
NESTING = tuple(name for engine in PROFILES.values() for name in engine.nesting_fields)
WITHHELD = (*PLACING, *TRANSFER)  # the usual ones
PRIORITY = "priority"  # the router reads it where there are classes

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
    ordered = asked.priority is not None and PRIORITY in names
    priority: int | None = lenient(asked.priority, int) if ordered else None
    kept: Any = body
    if ordered or _reserved_in(asked) != _NONE_RESERVED:
        fields = _decode_fields(body)
        others = {name: _within(name, value, names) for name, value in fields.items() if name not in names}
        if others != fields:
            kept = msgspec.json.encode(others)
    return kept, model, priority


def peek_unless_withheld(body: bytes) -> Peek | None:
    """The fields that the router reads, in one reading; None if that fails, or if a field may have to be withheld."""
    try:
        peek: Any = _decode_peek(body)
    except UNREADABLE:
        return None
    return peek if peek.priority is None and _reserved_in(peek) == _NONE_RESERVED else None


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


# ---- forms (RFC 7578)

# They go on as they came: a field that only the router may set is refused, and so is any second reading. vLLM reads
# `vllm_xargs` of a transcription as JSON, and takes `kv_transfer_params` from there.


FORM = b"multipart/form-data"
MAX_PARTS = 2000  # Starlette's limits: 1,000 fields and 1,000 files
MAX_BEFORE = 64  # line ends before the first part
# The charset would be that of names, too; a second boundary would make another form of it.
_TYPE = re.compile(
    rb"""multipart/form-data *; *boundary=("?)([\w'()+,./:=?-]{1,70})\1(?: *; *charset="?utf-8"?)?""", re.IGNORECASE
)
_OTHERS = rb"(?:content-(?:type|length|transfer-encoding|id):[^\r\n]*\r\n)*"
_NAMED = rb"""content-disposition: *form-data; *name=("?)([\w.\[\]-]+)\1"""
_FILE = rb"""(?:; *filename(?:\*?=[^\r\n";]*|="[^\r\n"]*"))*\r\n"""
_HEAD = re.compile(rb"\r\n" + _OTHERS + _NAMED + _FILE + _OTHERS + rb"\r\n", re.IGNORECASE)


def check_form(content_type: bytes, body: bytes, withheld: Collection[str]) -> None:
    """Raise ApiError 400 unless every reader finds the same fields in this form, and none of these among them."""
    if (told := _TYPE.fullmatch(content_type)) is None:
        shown = quoted(content_type.decode("latin-1"))
        raise invalid(f"the Content-Type is {shown}; a form's is multipart/form-data with a boundary, and nothing else")
    refused = {*withheld, *NESTING} if TRANSFER[0] in withheld else set(withheld)
    mark = b"--" + told[2]
    at, parts = body.find(mark), 0
    if at < 0 or at > MAX_BEFORE or body[:at].strip(b"\r\n"):
        raise invalid("the body is no form: it does not begin with the boundary that the Content-Type names")
    while at >= 0:
        at, parts = at + len(mark), parts + 1
        if not body.startswith(b"--", at):
            head = _HEAD.match(body, at)
            if head is None or parts > MAX_PARTS:
                why = f"it begins with no Content-Disposition and a plain name, or there are more than {MAX_PARTS}"
                raise invalid(f"part {parts} of the form cannot be read: {why}")
            if (name := head[2].decode()) in refused:
                raise invalid(f"the form sets {name}, which only the router may; leave it out", name)
            at = head.end()
        at = body.find(mark, at)
