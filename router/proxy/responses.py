"""Which replica holds which response: an engine keeps those that it made, and no other engine knows them."""

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple

MOST_RESPONSES = 20_000


class Held(NamedTuple):
    replica: str
    salt: str | None  # of the key that it was made for: keys with another one must not see it
    model: str = ""


class HeldResponses:
    """The newest responses by id."""

    def __init__(self, most: int = MOST_RESPONSES) -> None:
        self.ask_others: Callable[[str], Awaitable[Iterable[Held]]] | None = None  # workers of the same router
        self._most = most
        self._held: OrderedDict[str, Held] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def add(self, response_id: str, replica: str, salt: str | None, model: str = "") -> None:
        self._held[response_id] = Held(replica, salt, model)
        self._held.move_to_end(response_id)
        if len(self._held) > self._most:
            self._held.popitem(last=False)

    def may_be_elsewhere(self, response_id: str) -> bool:
        """Return whether only another worker may know this response."""
        return self.ask_others is not None and response_id not in self._held

    async def find(self, response_id: str) -> None:
        """Learn of the response, if another worker knows it."""
        if self.ask_others is not None:
            for held in await self.ask_others(response_id):
                self.add(response_id, *held)

    def get(self, response_id: str) -> Held | None:
        return self._held.get(response_id)
