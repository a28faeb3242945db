"""Stored events that wait for the key of a hash, and those that report blocks again."""

from collections.abc import Callable, Iterable, Iterator

from events.cache.changes import Stored
from events.cache.groups import Layout
from events.cache.naming import Naming
from events.cache.pool import Pool
from events.cache.pools import Pools, ResolverStats
from events.cache.slices import StoredPiece
from events.messages import BlockStored, Hash

ORPHAN_TOKENS = 16  # this many count as a block


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

    def wait(self, for_hash: Hash, event: BlockStored) -> str | None:
        """Keep an event until this hash has a key; beyond the limit, drop the oldest ones, and say so."""
        self._stats.orphan_blocks += len(event.block_hashes) if event.token_ids else 1
        self.setdefault(for_hash, []).append(event)
        self.blocks += _weight(event)
        if self.blocks > self.limit and self.gone > self.limit // 10:
            self.gone = 0
            for awaited in list(self):
                if kept := [event for event in self.take(awaited) if self._pools.holds_some(event)]:
                    self[awaited] = kept
                    self.blocks += sum(map(_weight, kept))
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
        events = self.pop(for_hash, [])
        self.blocks -= sum(map(_weight, events))
        return events

    def check(self) -> None:
        waiting = sum(_weight(event) for events in self.values() for event in events)
        assert waiting == self.blocks <= self.limit, f"{waiting} blocks wait, {self.blocks} counted"


def _weight(event: BlockStored) -> int:
    """An orphan's share of the limit, in blocks."""
    return max(len(event.block_hashes), len(event.token_ids) // ORPHAN_TOKENS) if event.token_ids else 1


class Reports:
    """The reports of one replica: if there are any, and what may have been one.

    vLLM can be asked, request by request, to report the blocks that a request has found in its cache. Such a report
    is a stored event like any other, from the root on, of blocks that are all resident. The same event says that a
    request has computed resident blocks again, because it was told not to read the cache: these are second copies,
    which are removed one by one.

    The next event of the group tells them apart: where the request goes on to new blocks, these follow the reported
    ones within the same batch, as nothing is computed in between. Until one such event has come, what looks like a
    report counts as copies; from then on it counts as nothing, and what was counted is taken back.
    """

    def __init__(self) -> None:
        self.seen = False
        self.copies = 0  # counted although they may be reports
        self.latest: tuple[Pool, Hash] | None = None  # the last event that looked like one, within this batch
        self.pieces_alike = False  # the pieces of the event that comes in pieces have looked like one so far

    def forget(self) -> None:
        self.seen, self.copies, self.latest = False, 0, None

    def like(self, event: BlockStored, pool: Pool) -> bool:
        if isinstance(event, StoredPiece) and event.start:
            if not self.pieces_alike:
                return False
        elif event.parent_block_hash is not None or event.block_hashes[0] not in pool.named:
            return False
        alike = pool.named.keys() >= set(event.block_hashes)
        if isinstance(event, StoredPiece):
            self.pieces_alike = alike
        elif alike:
            self.latest = pool, event.block_hashes[-1]
        return alike

    def proves(self, event: BlockStored, pool: Pool) -> bool:
        """Return True if this event says that the one before in its group was a report."""
        if self.latest is None or self.latest[0] is not pool:
            return False
        follows = event.parent_block_hash == self.latest[1]
        self.latest = None
        return follows

    def count(self, event: BlockStored, pool: Pool) -> None:
        pool.doubt(event.block_hashes)
        self.copies += len(event.block_hashes)

    def take_back(self, pools: Pools) -> Iterator[tuple[Pool, list[Hash]]]:
        """The engine is asked for reports: uncount the copies that looked like one; return blocks to remove by pool."""
        self.seen, self.copies = True, 0
        for pool in pools.values():
            yield pool, pool.take_back()

    def doubt(self, layout: Layout | None) -> str | None:
        """Reports of a group that keeps part of a prefix name blocks that it does not hold."""
        if layout is None or layout.whole or not self.seen:
            return None
        return "requests ask for reports of cached blocks, which name blocks that some of its groups do not hold"


def ends_in_a_hit(event: BlockStored, pool: Pool, layout: Layout | None) -> bool:
    """Return True for all blocks of a prefix that could be a hit: nobody computes them, so they are reported."""
    hashes = event.block_hashes
    if layout is None or event.parent_block_hash is not None:
        return False
    if len(event.token_ids) != event.block_size * len(hashes):
        return False
    needed = max([1, *(group.blocks for group in layout.groups if group.group == pool.group)])
    return pool.named.keys() >= set(hashes[-needed:])
