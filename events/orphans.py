"""Stored events that wait for the key of a hash: their parent's, or (without tokens) of their own blocks."""

from collections.abc import Callable, Iterable, Iterator

from events.changes import Stored
from events.messages import BlockStored, Hash
from events.naming import Naming
from events.pool import Pool
from events.pools import Pools
from events.resolver_stats import ResolverStats
from events.slices import StoredPiece

ORPHAN_TOKENS = 16  # so many count as a block


class Orphans(dict[Hash, list[BlockStored]]):
    """Events by the hash they wait for, the oldest first: at most `limit` blocks. Add by `wait`, remove by `wake`."""

    def __init__(self, limit: int, pools: Pools, naming: Naming, stats: ResolverStats) -> None:
        super().__init__()
        self.limit = limit
        self.blocks = 0
        self.gone = 0  # blocks removed without a key: some of them still wait
        self._pools = pools
        self._naming = naming
        self._stats = stats

    def clear(self) -> None:
        super().clear()
        self.blocks = 0

    def wait_for_parent(self, event: BlockStored) -> str | None:
        """Keep an event until its parent has a key, as `wait` does."""
        parent = event.parent_block_hash
        if isinstance(event, StoredPiece):
            if event.start:  # the whole event waits
                return None
            event = event.whole.event
        assert parent is not None, "a block without a parent follows the root"
        return self.wait(parent, event)

    def wait(self, for_hash: Hash, event: BlockStored) -> str | None:
        """Keep an event until this hash has a key; beyond the limit, drop the oldest ones, and say so."""
        self._stats.orphan_blocks += len(event.block_hashes) if event.token_ids else 1
        self.setdefault(for_hash, []).append(event)
        self.blocks += _weight(event)
        if self.blocks > self.limit and self.gone > self.limit // 10:
            self.gone = 0
            for awaited in list(self):
                self._keep(awaited, [event for event in self[awaited] if self._pools.holds_some(event)])
        if self.blocks <= self.limit:
            return None
        while self.blocks > self.limit:
            self._stats.orphans_dropped += sum(len(event.block_hashes) for event in self.take(next(iter(self))))
        return f"more than {self.limit} blocks waited for their parent; the oldest were dropped"

    def wake(
        self, named: Iterable[tuple[Hash, int]], assign: Callable[[Pool, Hash, int], list[int]]
    ) -> Iterator[Stored]:
        """Name blocks that waited for these hashes, and recursively their children."""
        todo = list(named)
        while todo:
            block_hash, key = todo.pop()
            for event in self.take(block_hash):
                self._stats.orphans_resolved += 1
                pool = self._pools.of(event.medium, event.group_idx)
                chain = self._naming.chain(event, key) if event.token_ids else [key]
                if chain is None:
                    self._stats.unpaired_blocks += len(event.block_hashes)
                    continue
                children = event.block_hashes if event.token_ids else [block_hash]
                new: list[int] = []
                for child, child_key in zip(children, chain, strict=True):
                    if child in pool:  # it may have been removed while it waited
                        new += assign(pool, child, child_key)
                yield Stored(pool.medium, new, chain, key if event.token_ids else 0, event, pool.group)
                todo += zip(children, chain, strict=True)

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
