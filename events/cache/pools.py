"""One replica's blocks in all pools (one for each medium and KV-cache group), their counts and what they may hold."""

from collections.abc import Sequence
from itertools import takewhile

from msgspec import Struct

from events.cache.changes import Held
from events.cache.groups import Layout, hits
from events.cache.pool import Digest, Pool, digest_of, fold, pool_name
from events.messages import BlockStored, Hash


class Pools(dict[tuple[str, int], Pool]):
    """Pools by medium and group; add one by `of`."""

    def __init__(self, *, native: bool = False) -> None:
        super().__init__()
        self.native = native

    def of(self, medium: str | None, group: int | None) -> Pool:
        name = pool_name(medium, group)
        pool = self.get(name)
        if pool is None:
            pool = self[name] = Pool(*name, native=self.native)
        return pool

    @property
    def blocks(self) -> int:
        return sum(map(len, self.values()))

    def key(self, block_hash: Hash) -> int | None:
        """The key of a hash that is resident anywhere, if it has one."""
        for pool in self.values():
            key = pool.key(block_hash)
            if key is not None:
                return key
        return None

    def holds_some(self, event: BlockStored) -> bool:
        pool = self.get(pool_name(event.medium, event.group_idx))
        return pool is not None and any(block_hash in pool for block_hash in event.block_hashes)

    def held(self) -> tuple[Held, ...]:
        return tuple(Held(pool.medium, pool.group, pool.held) for pool in self.values() if pool.held)

    def matched(self, keys: Sequence[int], medium: str, layout: Layout | None) -> int:
        """Count the leading blocks of a prompt that the medium holds, in units of the layout if there is one."""
        held = {pool.group: pool.held for pool in self.values() if pool.medium == medium}
        if layout is None:
            return sum(1 for _ in takewhile(held.get(0, set()).__contains__, keys))

        def masks_of(group: int, wanted: Sequence[int]) -> list[int]:
            return [int(key in held.get(group, ())) for key in wanted]

        return hits(layout, keys, masks_of, 1).get(0, 0)

    def digest(self) -> Digest:
        pools = self.values()
        return digest_of(
            (pool.medium, pool.group, len(pool), pool.xor if self.native else fold(pool.resident)) for pool in pools
        )


class ResolverStats(Struct):
    stored_blocks: int = 0
    removed_blocks: int = 0
    cleared: int = 0
    duplicate_blocks: int = 0
    orphan_blocks: int = 0
    orphans_resolved: int = 0
    orphans_dropped: int = 0
    unpaired_blocks: int = 0
    reported_blocks: int = 0  # resident ones, told again because a request asked for it
    removed_unknown: int = 0
    unknown_events: int = 0
    rejected_events: int = 0
    remote_blocks: int = 0  # stored or removed in a place that is not the replica's own
    refused_blocks: int = 0  # they would be more than the replica can hold


MAX_BLOCKS = 2**21  # the limit for one replica, in all media: its views take a gigabyte then
TOO_MANY_BLOCKS = "it says it holds more than {:,} blocks, which is the most that is kept of a replica"
MAX_POOLS = 64
MAX_MEDIA = 8  # every prompt is looked up in each of them
MAX_MEDIUM_CHARS = 64
SLACK_BLOCKS = 64  # beside a twentieth: what an engine announces before it has evicted for it


class Capacity:
    """Bounds a replica's pools, and notes what it claims beyond that."""

    def __init__(self, pools: Pools) -> None:
        self.gpu_blocks: int | None = None  # the size of its GPU pool, as it says
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
        pools = self._pools
        name = event.medium or "GPU", event.group_idx or 0  # `pool_name`, without a call
        pool = pools.get(name)
        if pool is None:
            media = {medium for medium, _ in pools} | {name[0]}
            if len(pools) >= MAX_POOLS or len(media) > MAX_MEDIA or len(name[0]) > MAX_MEDIUM_CHARS:
                self.overclaim = f"it claims more than {MAX_MEDIA} media or {MAX_POOLS} pools of blocks"
                return None
            pool = pools.of(*name)
        elif len(pools) == 1:
            blocks = len(pool) + len(event.block_hashes)
            if blocks <= MAX_BLOCKS and (not self.gpu_blocks or blocks <= self.gpu_blocks):
                return pool  # nothing has to be added up
        if not self._excess(pool.medium, len(event.block_hashes)):
            return pool
        more = sum(block_hash not in pool for block_hash in event.block_hashes)  # copies take no room here
        return None if more and self._excess(pool.medium, more, say=True) else pool

    def room(self, pool: Pool) -> int:
        """Blocks that this pool may hold beside those known; below zero if it is claimed to hold too many."""
        most = self.cacheable_blocks or self.gpu_blocks or MAX_BLOCKS
        return min(most, MAX_BLOCKS) - len(pool) - len(pool.unnamed)

    def is_too_small_for(self, blocks: int) -> bool:
        """Return whether re-reading a replica with this many blocks would exceed the limits again."""
        if blocks > MAX_BLOCKS:
            self.full = TOO_MANY_BLOCKS.format(MAX_BLOCKS)
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
        if total <= MAX_BLOCKS:
            return False
        if say:  # it may well hold them
            self.full = TOO_MANY_BLOCKS.format(MAX_BLOCKS)
        return True
