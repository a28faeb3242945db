"""Fields that clients may not set: they name hosts that an engine connects to, and blocks that it reads there."""

import msgspec
from msgspec import Raw

from api.errors import invalid
from router.prompts.prompt import UNREADABLE

WITHHELD = ("kv_transfer_params", "ec_transfer_params")
_MARK, _ESCAPE = b"_transfer_params", b"\\u00"  # or they are spelled with escapes

_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode


def may_have_withheld(body: bytes | bytearray) -> bool:
    """Tell whether it takes parsing to see that none of these fields is there."""
    return _MARK in body or _ESCAPE in body


def without_withheld(body: bytes) -> bytes:
    """The body without these fields; raise ApiError 400 if it may have some and cannot be parsed."""
    if not may_have_withheld(body):
        return body
    try:
        fields = _decode_fields(body)
    except UNREADABLE as error:
        if not bytes(body[:64]).lstrip().startswith(b"{"):
            return body  # no engine reads fields in it
        why = f"it cannot be read ({error}), and seems to set {WITHHELD[0]}, which only the router may"
        raise invalid(f"the body is refused: {why}") from None
    if fields.keys().isdisjoint(WITHHELD):
        return body
    return msgspec.json.encode({name: value for name, value in fields.items() if name not in WITHHELD})
