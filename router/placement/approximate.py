"""Guessed cache contents of replicas without events, from the prompts routed to them.

A guess is in the index under the replica's slot, as if the replica had stored it. It is bounded by the usual size of
such a cache, and evicted as such caches evict: the least recently used first, a prompt's end before its beginning.
"""

from collections import OrderedDict
from collections.abc import Sequence

from router.placement.index import PrefixIndex
from router.placement.prices import GPU

APPROXIMATE = 0  # the block size of a replica without events: its blocks are parts of a prompt's bytes
APPROXIMATE_TOKENS = 2**20  # most that a replica without events is assumed to hold
USUAL_APPROXIMATE_BLOCK_TOKENS = 64
USUAL_BLOCKS = APPROXIMATE_TOKENS // USUAL_APPROXIMATE_BLOCK_TOKENS


class Approximate:
    def __init__(self, index: PrefixIndex, capacity_blocks: int = USUAL_BLOCKS) -> None:
        """Bound the guess for each replica by the capacity."""
        self._index = index
        self._capacity_blocks = capacity_blocks
        self._held: dict[int, OrderedDict[int, None]] = {}  # by slot; the next to be forgotten first

    def routed(self, slot: int, keys: Sequence[int]) -> None:
        """Count these blocks, a prompt's from its beginning, as cached by the replica now."""
        held = self._held.get(slot)
        if held is None:
            held = self._held[slot] = OrderedDict()
        if len(keys) > self._capacity_blocks:
            keys = keys[: self._capacity_blocks]
        new, touch = [], held.move_to_end
        for key in reversed(keys):  # so that the end is forgotten before the beginning
            if key in held:
                touch(key)
            else:
                held[key] = None
                new.append(key)
        if new:
            new.reverse()
            self._index.store(slot, new)
            self._forget(slot, held, len(held) - self._capacity_blocks)

    def _forget(self, slot: int, held: OrderedDict[int, None], count: int) -> None:
        if count > 0:
            self._index.remove(slot, [held.popitem(last=False)[0] for _ in range(count)])

    def blocks(self, slot: int) -> int:
        return len(self._held.get(slot, ()))

    def clear(self, slot: int) -> None:
        """Forget the blocks of a replica that is gone or empty."""
        self._index.clear(slot, ((GPU, 0, self._held.pop(slot, ())),))

    def check(self) -> None:
        for slot, held in self._held.items():
            assert len(held) <= self._capacity_blocks
            known = sum(self._index.blocks(slot).values())
            assert known == len(held), f"slot {slot}: {known} blocks in the index, {len(held)} here"
