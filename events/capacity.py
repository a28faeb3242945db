"""The number of blocks that one replica can hold, and that are kept of it at most."""

from events.messages import BlockStored
from events.pool import Pool
from events.pools import Pools

MOST_BLOCKS = 2**21  # of one replica, in all media: its views take a gigabyte then
TOO_MANY_BLOCKS = "it says it holds more than {:,} blocks, which is the most that is kept of a replica"
MOST_POOLS = 64
MOST_MEDIA = 8  # every prompt is looked up in each of them
MOST_MEDIUM_CHARS = 64
SLACK_BLOCKS = 64  # beside a twentieth: what an engine announces before it has evicted for it


class Capacity:
    """Bounds a replica's pools, and notes what it claims beyond that."""

    def __init__(self, pools: Pools) -> None:
        self.gpu_blocks: int | None = None  # what it says its GPU pool has room for
        self.cacheable_blocks: int | None = None  # those of them that can hold a prefix; None: unknown
        self.overclaim: str | None = None  # it has claimed more than it can hold
        self.full: str | None = None  # it has more than is kept
        self._pools = pools

    def limit(self, gpu_blocks: int | None, cacheable_blocks: int | None = None) -> None:
        """Take no more blocks of GPU memory than these from now on; None: the size of its pool is not known.

        `cacheable_blocks`: those of them that can hold a prefix.
        """
        self.gpu_blocks, self.cacheable_blocks = gpu_blocks, cacheable_blocks
        self._excess("GPU", 0)

    def forgive(self) -> None:
        """Forget its claims: it holds nothing more than we do."""
        self.overclaim = self.full = None

    def pool_with_room(self, event: BlockStored) -> Pool | None:
        """Return the event's pool, or None, noting the reason, if the replica cannot hold that much."""
        pools = self._pools
        name = event.medium or "GPU", event.group_idx or 0  # `pool_name`, without a call
        pool = pools.get(name)
        if pool is None:
            media = {medium for medium, _ in pools} | {name[0]}
            if len(pools) >= MOST_POOLS or len(media) > MOST_MEDIA or len(name[0]) > MOST_MEDIUM_CHARS:
                self.overclaim = f"it claims more than {MOST_MEDIA} media or {MOST_POOLS} pools of blocks"
                return None
            pool = pools.of(*name)
        elif len(pools) == 1:
            blocks = len(pool) + len(event.block_hashes)
            if blocks <= MOST_BLOCKS and (not self.gpu_blocks or blocks <= self.gpu_blocks):
                return pool  # without adding up
        if not self._excess(pool.medium, len(event.block_hashes)):
            return pool
        more = sum(block_hash not in pool for block_hash in event.block_hashes)  # copies take no room here
        return None if more and self._excess(pool.medium, more, say=True) else pool

    def room(self, pool: Pool) -> int:
        """Blocks that this pool may hold beside those known; below zero if it is claimed to hold too many."""
        most = self.cacheable_blocks or self.gpu_blocks or MOST_BLOCKS
        return min(most, MOST_BLOCKS) - len(pool) - len(pool.unnamed)

    def has_room_for_copies(self, copies: int) -> bool:
        """Return whether so many blocks may be second copies of resident ones."""
        return self.gpu_blocks is None or self._pools.blocks + copies <= self.gpu_blocks

    def is_too_small_for(self, blocks: int) -> bool:
        """Return whether re-reading a replica with this many blocks would exceed the limits again."""
        if blocks > MOST_BLOCKS:
            self.full = TOO_MANY_BLOCKS.format(MOST_BLOCKS)
            return True
        more = blocks - self._pools.blocks
        return self.overclaim is not None and more > 0 and self._excess("GPU", more)

    def _excess(self, medium: str, more: int, *, say: bool = False) -> bool:
        """Return True if that would be more than it can hold, or than is kept of it."""
        total = more + self._pools.blocks
        say = say or not more
        if medium == "GPU" and self.gpu_blocks is not None and total > self.gpu_blocks:
            most = self.gpu_blocks + self.gpu_blocks // 20 + SLACK_BLOCKS
            if more + sum(len(pool) for pool in self._pools.values() if pool.medium == "GPU") > most:
                if say:
                    self.overclaim = f"it claims to hold more than the {self.gpu_blocks:,} blocks that its pool has"
                return True
        if total <= MOST_BLOCKS:
            return False
        if say:  # it may well hold them
            self.full = TOO_MANY_BLOCKS.format(MOST_BLOCKS)
        return True
