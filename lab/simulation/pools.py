"""The engine's block pool, and what it would be with other rules of eviction."""

from collections.abc import Callable, Sequence

from replica.block_pool import BlockPool


class HeadFirst(BlockPool):
    """The least recently used request goes first, and of its blocks the first: what hurts most when it is missing."""

    def release(self, blocks: Sequence[int]) -> None:
        super().release(blocks[::-1])


POOLS: dict[str, Callable[[int], BlockPool]] = {
    "lru": lambda blocks: BlockPool(blocks, 1),
    "head-first": lambda blocks: HeadFirst(blocks, 1),
}


def make_pool(eviction: str, blocks: int) -> BlockPool:
    return POOLS[eviction](blocks)
