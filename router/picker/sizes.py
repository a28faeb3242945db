"""Limits what a message has beside a body, before it is decoded: a header takes two bytes there, and many more here."""

from router.picker.schema import MESSAGES

MOST_BESIDE_BYTES = 256 * 1024  # headers and metadata
MOST_FIELDS = 1000  # a usual message has three
BODIES = frozenset(MESSAGES["ProcessingRequest"][name][0] for name in ("request_body", "response_body"))

LONGEST_VARINT = 10


def check_sizes(raw: bytes) -> None:
    """Raise ValueError if so many bytes are no part of a body."""
    if len(raw) <= MOST_BESIDE_BYTES:
        return
    at = beside = fields = 0
    while at < len(raw):
        start, fields = at, fields + 1
        number, at = _after_field(raw, at)
        beside += 0 if number in BODIES else at - start
        if beside > MOST_BESIDE_BYTES or fields > MOST_FIELDS:
            raise ValueError(f"the message has more than {MOST_BESIDE_BYTES:,} bytes beside a body; send less")


def _after_field(raw: bytes, at: int) -> tuple[int, int]:
    """The number of a field, and where the next one begins."""
    tag, at = _varint(raw, at)
    match tag & 7:
        case 0:
            _, at = _varint(raw, at)
        case 1:
            at += 8
        case 2:
            size, at = _varint(raw, at)
            at += size
        case 5:
            at += 4
        case kind:
            raise ValueError(f"the message has a field of the wire type {kind}")
    return tag >> 3, at


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 7 * LONGEST_VARINT, 7):
        if at >= len(raw):
            break
        byte, at = raw[at], at + 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("the message has a number without an end")
