"""Which replica holds which response: an engine keeps those that it made, and no other engine knows them."""

from collections import OrderedDict
from typing import NamedTuple

MOST_RESPONSES = 20_000


class Held(NamedTuple):
    replica: str
    salt: str | None  # of the key that it was made for: keys with another one must not see it


class HeldResponses:
    """The newest responses by id."""

    def __init__(self, most: int = MOST_RESPONSES) -> None:
        self._most = most
        self._held: OrderedDict[str, Held] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def add(self, response_id: str, replica: str, salt: str | None) -> None:
        self._held[response_id] = Held(replica, salt)
        self._held.move_to_end(response_id)
        if len(self._held) > self._most:
            self._held.popitem(last=False)

    def get(self, response_id: str) -> Held | None:
        return self._held.get(response_id)
