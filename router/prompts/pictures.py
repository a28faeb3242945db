"""Pictures in requests: an engine knows each by a name of its own, and computes tokens in its place.

A conversation is asked about with a small picture in the place of each of its own, and each of these by itself, once.
"""

import re
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, TypeAlias

import msgspec
from msgspec import Raw, Struct

from events.blocks import TOKEN_BYTES, ExtraKey, Extras

MARK = b"\xff" * TOKEN_BYTES  # stands for a picture among packed tokens: no token has such an id
MOST = 32  # pictures in a prompt
MAX_BYTES = 8 * 1024 * 1024  # a picture in its message
MAX_CUT_BYTES = 256 * 1024  # everything beside the pictures
ITEMS = {"chat": "messages", "messages": "messages", "responses": "input"}
MEDIA = re.compile(rb'"type"\s*:\s*"(?:input_)?(?:image|audio|video|file|document)')
_PNG = b"iVBORw0KGgoAAAANSUhEUgAAAEAAAABAAQAAAACCEkxzAAAAD0lEQVR42mNgGAWjgHwAAAJAAAHgTR1EAAAAAElFTkSuQmCC"
STAND_INS = {
    "chat": b'{"type":"image_url","image_url":{"url":"data:image/png;base64,%b"}}' % _PNG,
    "messages": b'{"type":"image","source":{"type":"base64","media_type":"image/png","data":"%b"}}' % _PNG,
    "responses": b'{"type":"input_image","detail":"auto","image_url":"data:image/png;base64,%b"}' % _PNG,
}

# A picture's name and the tokens in its place: where they begin, and how many there are.
Place: TypeAlias = tuple[str, int, int]


class Cut(Struct):
    """A body with small pictures for its own, each of which stood in it from one byte to another."""

    body: bytes
    pictures: list[tuple[bytes, int, int]]  # each with a digest of its part


class _Part(Struct):
    """A part of a message, or what it says of its data."""

    type: Any = None
    image_url: Raw = Raw(b"")
    source: Raw = Raw(b"")
    url: Raw = Raw(b"")


_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_items = msgspec.json.Decoder(list[dict[str, Raw]]).decode
_decode_parts = msgspec.json.Decoder(list[Raw]).decode
_decode_part = msgspec.json.Decoder(_Part).decode


def cut(api: str, body: bytes) -> Cut | None:
    """Take the pictures out of a body; None if it has other media, or much else. It raises what decoding raises."""
    if MEDIA.search(body) is None:
        return Cut(body, []) if len(body) <= MAX_CUT_BYTES else None
    fields, pictures, name = _decode_fields(body), list[tuple[bytes, int, int]](), ITEMS.get(api, "")
    given = fields.get(name, Raw(b""))
    items = _decode_items(given) if bytes(given).startswith(b"[") else []
    for item in items:
        content = item.get("content", Raw(b""))
        parts = _decode_parts(content) if bytes(content).startswith(b"[") else []
        places = [place for place, part in enumerate(parts) if is_within(bytes(part))]
        for place in places[: MOST - len(pictures)]:
            part, parts[place] = bytes(parts[place]), Raw(STAND_INS[api])
            start = body.index(part)
            pictures.append((digest(part), start, start + len(part)))
        if places:
            item["content"] = Raw(msgspec.json.encode(parts))
    if pictures:
        fields[name] = Raw(msgspec.json.encode(items))
    rest = msgspec.json.encode(fields)
    is_all = len(rest) <= MAX_CUT_BYTES and len(MEDIA.findall(rest)) == len(pictures)
    return Cut(rest, pictures) if is_all else None


def digest(part: bytes) -> bytes:
    return blake2b(part, digest_size=16).digest()


def is_within(text: bytes) -> bool:
    """Tell whether this part is a picture whose data stand in it; an address proves no content."""
    part = _decode_part(text) if text.startswith(b"{") and len(text) <= MAX_BYTES else _Part()
    given = bytes(part.source if part.type == "image" else part.image_url)
    held = _decode_part(given) if given.startswith(b"{") else _Part(url=Raw(given))
    is_url = part.type in ("image_url", "input_image") and bytes(held.url).startswith(b'"data:')
    return is_url or (part.type, held.type) == ("image", "base64")


def placed(marked: list[bytes], pictures: Sequence[Sequence[bytes]]) -> tuple[list[bytes], list[Place]]:
    """Prompts with the pictures of the first, each told by its tokens and its name, at the marks; none without them."""
    marks = [one.count(MARK) for one in marked]
    if not all(pictures) or marks[:1] != [len(pictures)] or any(marks[1:]):
        return [], []
    (packed, *after), places = marked[0].split(MARK), list[Place]()
    for (tokens, name), text in zip(pictures, after, strict=True):
        places.append((name.decode(), len(packed) // TOKEN_BYTES, len(tokens) // TOKEN_BYTES))
        packed += tokens + text
    return [packed, *marked[1:]], places


def extras_of(places: Sequence[Place], block_size: int) -> Extras:
    """The names of the pictures in each block, with their beginnings from the block's own."""
    found: dict[int, list[ExtraKey]] = {}
    for name, start, length in places:
        for block in range(start // block_size, (start + length - 1) // block_size + 1):
            found.setdefault(block, []).append((name, start - block * block_size))
    return found
