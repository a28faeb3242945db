"""The engine's block pool, and a variant with another eviction rule."""

from collections.abc import Callable, Sequence

from replica.block_pool import BlockPool


class HeadFirst(BlockPool):
    """Evict the first blocks of the least recently used request first: their loss hurts most."""

    def release(self, blocks: Sequence[int]) -> None:
        super().release(blocks[::-1])


POOLS: dict[str, Callable[[int], BlockPool]] = {
    "lru": lambda blocks: BlockPool(blocks, 1),
    "head-first": lambda blocks: HeadFirst(blocks, 1),
}


def make_pool(eviction: str, blocks: int) -> BlockPool:
    return POOLS[eviction](blocks)
