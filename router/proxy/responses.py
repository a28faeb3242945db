"""Which replica holds which response: an engine keeps those that it made, and no other engine knows them."""

from collections import OrderedDict

MOST_RESPONSES = 20_000


class HeldResponses:
    """The newest responses by id, with the name of the replica that made each."""

    def __init__(self, most: int = MOST_RESPONSES) -> None:
        self._most = most
        self._holders: OrderedDict[bytes, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, response_id: bytes, replica: str) -> None:
        self._holders[response_id] = replica
        self._holders.move_to_end(response_id)
        if len(self._holders) > self._most:
            self._holders.popitem(last=False)

    def get(self, response_id: bytes) -> str | None:
        return self._holders.get(response_id)
