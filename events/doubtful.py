"""The keys of blocks that were resident before a loss of events: any of them may be gone.

They are no claim. They give stored blocks the key of their parent, and a block that the replica is seen to use again
its hash, without which its removal could not be followed.
"""

from collections.abc import Iterable

from events.messages import Hash
from events.pool import Pool
from events.pools import Pools

MAIN = "GPU", 0


class Doubtful:
    """At most as many blocks as were resident at the last loss, and before; nothing before the first loss."""

    def __init__(self) -> None:
        self.after_loss = False  # there may be blocks that nobody told of
        self.unknown_removals = 0  # of blocks whose key was not known
        self.keys: dict[Hash, int] = {}
        self._hashes: dict[int, Hash] = {}
        self._pools_before: set[tuple[str, int]] = set()  # the loss

    def __bool__(self) -> bool:
        return bool(self.keys)

    def lose(self, pools: Pools, limit: int, *, keep: bool) -> None:
        """Events were lost: doubt these pools' blocks, or, unless they are to be kept, only note their pools."""
        self.after_loss = True
        self._pools_before |= pools.keys()
        if keep and (pool := pools.get(MAIN)) is not None:
            self._add(pool, limit)

    def _add(self, pool: Pool, limit: int) -> None:
        """Add a pool's blocks; beyond the limit, drop those of earlier losses."""
        if len(self.keys) + len(pool) > limit:
            self._drop_all()
        for block_hash, key in pool.named.items():
            if key is not None and key not in pool.holders:  # one of several hashes: which, nobody could tell
                self.keys[block_hash] = key
                self._hashes[key] = block_hash

    def gone(self, hashes: Iterable[Hash]) -> int:
        """Note removals of blocks that are not known to be resident; return how many have no known key."""
        unknown = sum(not self._forget(block_hash) for block_hash in hashes)
        self.unknown_removals += unknown
        return unknown

    def take(self, keys: Iterable[int]) -> list[tuple[Hash, int]]:
        """Remove and return those of these blocks that are known, by hash and key."""
        taken = [(self._hashes[key], key) for key in keys if key in self._hashes]
        for block_hash, _ in taken:
            self._forget(block_hash)
        return taken

    def _forget(self, block_hash: Hash) -> bool:
        """Forget a block; return False if it is not known."""
        key = self.keys.pop(block_hash, None)
        if key is not None:
            self._hashes.pop(key, None)
        return key is not None

    def is_of_one_group(self, pools: Pools) -> bool:
        """Return whether there may be blocks that nobody told of, and only in the first pool of GPU memory."""
        return self.after_loss and self._pools_before | pools.keys() <= {MAIN}

    def turned_over(self, pools: Pools, cacheable_blocks: int | None) -> Pool | None:
        """The replica's pool if the known blocks fill it: then there are no others, and no second copies.

        This needs a single pool, in which every block has one hash.
        """
        if cacheable_blocks is None or self._pools_before | pools.keys() != {MAIN}:
            return None
        pool = pools.get(MAIN)
        return pool if pool is not None and len(pool) == cacheable_blocks and not pool.spent else None

    def clear(self) -> None:
        """All of the cache is known."""
        self.after_loss = False
        self._pools_before = set()
        self._drop_all()

    def _drop_all(self) -> None:
        self.keys.clear()
        self._hashes.clear()
