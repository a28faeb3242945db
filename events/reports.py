"""Tells an engine's reports of resident blocks from second copies of them.

vLLM can be asked, request by request, to report the blocks that a request has found in its cache. Such a report is a
stored event like any other, from the root on, of blocks that are all resident. The same event says that a request has
computed resident blocks again, because it was told not to read the cache: these are second copies, which are removed
one by one.

The next event of the group tells them apart: where the request goes on to new blocks, these follow the reported ones
within the same batch, as nothing is computed in between. Until one such event has come, what looks like a report counts
as copies; from then on it counts as nothing, and what was counted is taken back.
"""

from events.messages import BlockStored, Hash
from events.pool import Pool
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
