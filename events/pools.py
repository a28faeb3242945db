"""One replica's blocks in all pools: a pool for each medium and KV-cache group."""

from collections.abc import Sequence
from itertools import takewhile

from events.changes import Held
from events.groups import Layout, hits
from events.messages import BlockStored, Hash
from events.pool import Digest, Pool, digest_of, fold, pool_name


class Pools(dict[tuple[str, int], Pool]):
    """Pools by medium and group; add one by `of`."""

    def __init__(self, *, native: bool = False) -> None:
        super().__init__()
        self.native = native

    def of(self, medium: str | None, group: int | None) -> Pool:
        """The pool of this medium and group, made if there is none yet."""
        name = pool_name(medium, group)
        pool = self.get(name)
        if pool is None:
            pool = self[name] = Pool(*name, native=self.native)
        return pool

    @property
    def blocks(self) -> int:
        """The number of resident hashes."""
        return sum(map(len, self.values()))

    def key(self, block_hash: Hash) -> int | None:
        """The key of a hash that is resident anywhere, if it has one."""
        for pool in self.values():
            key = pool.key(block_hash)
            if key is not None:
                return key
        return None

    def holds_some(self, event: BlockStored) -> bool:
        """Return whether any block of the event is still resident."""
        pool = self.get(pool_name(event.medium, event.group_idx))
        return pool is not None and any(block_hash in pool for block_hash in event.block_hashes)

    def held(self) -> tuple[Held, ...]:
        """The keys of every pool that holds any."""
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
