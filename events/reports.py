"""Tells an engine's reports of resident blocks from second copies of them.

vLLM can be asked, request by request, to report the blocks that a request has found in its cache. Such a report is a
stored event like any other, from the root on, of blocks that are all resident. The same event says that a request has
computed resident blocks again, because it was told not to read the cache: these are second copies, which are removed
one by one.

The next event of the group tells them apart: where the request goes on to new blocks, these follow the reported ones
within the same batch, as nothing is computed in between. Until one such event has come, what looks like a report counts
as copies; from then on it counts as nothing, and what was counted is taken back.
"""

from collections.abc import Iterator

from events.groups import Layout
from events.messages import BlockStored, Hash
from events.pool import Pool
from events.pools import Pools
from events.slices import StoredPiece


class Reports:
    """The reports of one replica: if there are any, and what may have been one."""

    def __init__(self) -> None:
        self.seen = False
        self.copies = 0  # counted although they may be reports
        self.latest: tuple[Pool, Hash] | None = None  # the last event that looked like one, within this batch

    def forget(self) -> None:
        self.seen, self.copies, self.latest = False, 0, None

    def like(self, event: BlockStored, pool: Pool) -> bool:
        """Return True if the event looks like a report."""
        if isinstance(event, StoredPiece) and event.start:
            if not event.whole.reported:
                return False
        elif event.parent_block_hash is not None or event.block_hashes[0] not in pool.named:
            return False
        alike = pool.named.keys() >= set(event.block_hashes)
        if isinstance(event, StoredPiece):
            event.whole.reported = alike
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
        """Count the blocks as copies that may be reports."""
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
