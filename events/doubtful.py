"""The keys of blocks that were resident before a loss of events: any of them may be gone.

They are no claim. They give stored blocks the key of their parent, and a block that the replica is seen to use again
its hash, without which its removal could not be followed.
"""

from collections.abc import Iterable

from events.messages import Hash
from events.pool import Pool


class Doubtful:
    """At most as many blocks as were resident at the last loss, and before."""

    def __init__(self) -> None:
        self.keys: dict[Hash, int] = {}
        self._hashes: dict[int, Hash] = {}

    def __bool__(self) -> bool:
        return bool(self.keys)

    def add(self, pool: Pool, limit: int) -> None:
        """Add a pool's blocks; beyond the limit, drop those of earlier losses."""
        if len(self.keys) + len(pool) > limit:
            self.clear()
        for block_hash, key in pool.named.items():
            if key is not None and key not in pool.holders:  # one of several hashes: which, nobody could tell
                self.keys[block_hash] = key
                self._hashes[key] = block_hash

    def gone(self, block_hash: Hash) -> bool:
        """Forget a block that was removed since; return False if it is not known."""
        key = self.keys.pop(block_hash, None)
        if key is not None:
            self._hashes.pop(key, None)
        return key is not None

    def take(self, keys: Iterable[int]) -> list[tuple[Hash, int]]:
        """Remove and return those of these blocks that are known, by hash and key."""
        taken = [(self._hashes[key], key) for key in keys if key in self._hashes]
        for block_hash, _ in taken:
            self.gone(block_hash)
        return taken

    def clear(self) -> None:
        self.keys.clear()
        self._hashes.clear()
