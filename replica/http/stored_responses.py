"""The newest responses, which clients may continue or read. Pure, and bounded in number and bytes."""

from collections import OrderedDict

from msgspec import Struct

from api.errors import ApiError, quoted
from api.openai_responses.requests import Item
from api.responses import encode

MAX_RESPONSES = 1000
MAX_BYTES = 64 * 1024 * 1024


class StoredResponse(Struct, frozen=True):
    body: bytes  # the answer's JSON
    conversation: bytes  # the JSON of all its items, input and output


class Conversation(Struct):
    """All items of a stored response, as another request may begin with them."""

    items: list[Item]


class StoredResponses:
    def __init__(self, most: int = MAX_RESPONSES, most_bytes: int = MAX_BYTES) -> None:
        self.bytes = 0
        self._most = most
        self._most_bytes = most_bytes
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stored)

    def add(self, response_id: str, body: bytes, items: list[Item]) -> None:
        """Store a response, and drop the oldest beyond the limits; one above the limit by itself is not stored."""
        self._drop(response_id)
        stored = StoredResponse(body, encode(Conversation(items)))
        size = _size(stored)
        if size > self._most_bytes:
            return
        self._stored[response_id] = stored
        self.bytes += size
        while len(self._stored) > self._most or self.bytes > self._most_bytes:
            self._drop(next(iter(self._stored)))

    def get(self, response_id: str, param: str | None = None) -> StoredResponse:
        """The response; raise ApiError 404 if it is not here."""
        stored = self._stored.get(response_id)
        if stored is None:
            kept = f"a replica keeps its newest {self._most:,} responses until it ends, unless store is false"
            message = f"there is no response {quoted(response_id)}: {kept}; send the whole conversation as input"
            raise ApiError(404, message, param=param, code="response_not_found")
        return stored

    def remove(self, response_id: str) -> None:
        self.get(response_id)
        self._drop(response_id)

    def check(self) -> None:
        assert self.bytes == sum(map(_size, self._stored.values())) <= self._most_bytes
        assert len(self._stored) <= self._most

    def _drop(self, response_id: str) -> None:
        if (stored := self._stored.pop(response_id, None)) is not None:
            self.bytes -= _size(stored)


def _size(stored: StoredResponse) -> int:
    return len(stored.body) + len(stored.conversation)
