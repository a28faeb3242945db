"""The stored responses that a request names: the one that it continues, and those that have the items it refers to."""

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Raw, Struct

from api.openai_responses.requests import REFERENCE, response_of

# A body without one of these names none; the last may spell one of the others.
MARKS = (b"previous_response_id", REFERENCE.encode(), b"\\u00")


class NamedResponses(Struct, frozen=True):
    previous: str | None = None
    of_items: list[str] = []  # each once, in the order of the items

    @property
    def newest(self) -> str | None:
        """The last of those that have the items."""
        return self.of_items[-1] if self.of_items else None

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Each response, and the field that names it."""
        if self.previous is not None:
            yield self.previous, "previous_response_id"
        for response_id in self.of_items:
            yield response_id, "input"


class _Continued(Struct):
    previous_response_id: Any = None
    input: Raw = Raw(b"null")


class _Item(Struct):
    type: Any = None
    id: Any = None


_decode_continued = msgspec.json.Decoder(_Continued).decode
_decode_items = msgspec.json.Decoder(list[_Item]).decode
_decode_any = msgspec.json.Decoder().decode


def may_name(body: bytes | bytearray) -> bool:
    return any(mark in body for mark in MARKS)


def named_in(body: bytes | bytearray) -> NamedResponses:
    """Raises what msgspec does for a body that is no JSON object."""
    if not may_name(body):
        return NamedResponses()
    asked = _decode_continued(body)
    previous = asked.previous_response_id
    given, ids = asked.input, list[Any]()
    if bytes(memoryview(given)[:1]) == b"[":
        try:
            ids = [item.id for item in _decode_items(given) if item.type == REFERENCE]
        except msgspec.ValidationError:
            found = [item for item in _decode_any(given) if isinstance(item, dict)]
            ids = [item.get("id") for item in found if item.get("type") == REFERENCE]
    items = dict.fromkeys(filter(None, map(response_of, ids)))
    return NamedResponses(previous if isinstance(previous, str) else None, list(items))
