"""Stored events that wait for the key of a hash: their parent's, or (without tokens) of their own blocks."""

from collections.abc import Callable

from events.messages import BlockStored, Hash

ORPHAN_TOKENS = 16  # so many count as a block


class Orphans(dict[Hash, list[BlockStored]]):
    """Events by the hash they wait for, the oldest first: at most `limit` blocks. Add by `add`, remove by `take`."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.blocks = 0
        self.gone = 0  # blocks removed without a key: some of them still wait

    def clear(self) -> None:
        super().clear()
        self.blocks = 0

    def add(self, for_hash: Hash, event: BlockStored, is_resident: Callable[[BlockStored], bool]) -> int:
        """Return how many blocks were dropped for it: the oldest ones."""
        self.setdefault(for_hash, []).append(event)
        self.blocks += _weight(event)
        if self.blocks > self.limit and self.gone > self.limit // 10:
            self.gone = 0
            for awaited in list(self):
                self._keep(awaited, [event for event in self[awaited] if is_resident(event)])
        dropped = 0
        while self.blocks > self.limit:
            dropped += sum(len(event.block_hashes) for event in self.take(next(iter(self))))
        return dropped

    def take(self, for_hash: Hash) -> list[BlockStored]:
        """Remove and return the events that wait for this hash."""
        events = self.pop(for_hash, [])
        self.blocks -= sum(map(_weight, events))
        return events

    def _keep(self, for_hash: Hash, events: list[BlockStored]) -> None:
        self.blocks -= sum(map(_weight, self[for_hash])) - sum(map(_weight, events))
        if events:
            self[for_hash] = events
        else:
            del self[for_hash]

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        waiting = sum(_weight(event) for events in self.values() for event in events)
        assert waiting == self.blocks <= self.limit, f"{waiting} blocks wait, {self.blocks} counted"


def _weight(event: BlockStored) -> int:
    """An orphan's share of the limit, in blocks."""
    return max(len(event.block_hashes), len(event.token_ids) // ORPHAN_TOKENS) if event.token_ids else 1
