"""The content of each block, by which a hit is verified.

An identity is a number given to one content (tokens and extra keys from the start of the chain) and to no other ever.
"""

from array import array

import numpy as np
from numpy.typing import NDArray

from events.blocks import TOKEN_BYTES
from replica.chain import Chain
from replica.names import Slots

NOT_NAMED = -1  # instead of the parent's identity, also of a block that is no tail either


class Contents:
    """By slot, in memory seen in two ways: `array` is faster for one slot, numpy (`many`) for several."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.last_identity = 0
        self.identity = array("q", bytes(8 * num_blocks))
        self.parent = array("q", [NOT_NAMED]) * num_blocks  # the identity before it
        self.filled = array("i", bytes(4 * num_blocks))  # tokens that can be found: all if named, fewer of a tail
        self.many_identities = np.frombuffer(self.identity, np.int64)
        self.many_parents = np.frombuffer(self.parent, np.int64)
        self.many_filled = np.frombuffer(self.filled, np.int32)
        self.tokens = np.zeros(num_blocks, np.dtype((np.void, TOKEN_BYTES * block_size)))
        self.rows: NDArray[np.uint32] = self.tokens.view(np.uint32).reshape(num_blocks, block_size)
        self.exact: dict[int, bytes] = {}  # extra keys of the few slots that have any

    def count_same(self, chain: Chain, slots: Slots) -> int:
        """Count the slots, from the first, that hold the chain's own content."""
        count = len(slots)
        tokens = np.frombuffer(chain.tokens, self.tokens.dtype, count)
        stored = self.tokens.take(slots)
        parents, before = self.many_parents[slots], np.zeros(count, np.int64)
        before[1:] = self.many_identities[slots[:-1]]
        if parents.tobytes() != before.tobytes() or stored.tobytes() != tokens.tobytes():
            count = int(np.argmin((parents == before) & (stored == tokens)))
        if self.exact or chain.exact:
            for index, slot in enumerate(slots[:count].tolist()):
                if self.exact.get(slot) != chain.exact.get(index):
                    return index
        return count

    def is_same(self, slot: int, chain: Chain, index: int) -> bool:
        """Compare the slot with the chain's block `index`, which has the same key and follows the chain's identity."""
        tokens = chain.tokens[index * self.block_size : (index + 1) * self.block_size]
        return (
            self.parent[slot] == chain.identity
            and self.exact.get(slot) == chain.exact.get(index)
            and self.tokens[slot].tobytes() == tokens.tobytes()
        )

    def identify(self, chain: Chain, slots: Slots) -> None:
        """Give new identities to the chain's next blocks."""
        assert chain.identity is not None
        first = self.last_identity + 1
        identities = np.arange(first, first + len(slots))
        self.many_identities[slots] = identities
        self.many_parents[slots] = identities - 1
        self.parent[slots[0]] = chain.identity
        self.last_identity = chain.identity = int(identities[-1])

    def fill(self, chain: Chain, slots: Slots | int, start: int, stop: int) -> None:
        """Record the chain's tokens in its blocks from `start` to `stop`."""
        self.many_filled[slots] = self.block_size
        first_byte = start * self.tokens.itemsize
        self.tokens[slots] = np.frombuffer(chain.tokens, self.tokens.dtype, stop - start, first_byte)
        for index, exact in chain.exact.items():
            if start <= index < stop:
                slot = slots if isinstance(slots, int) else int(slots[index - start])
                self.exact[slot] = exact

    def is_findable(self, slots: Slots) -> NDArray[np.bool_]:
        """Distinguish named blocks and tails from empty blocks."""
        findable: NDArray[np.bool_] = self.many_parents[slots] != NOT_NAMED
        return findable

    def is_full(self, slots: Slots) -> NDArray[np.bool_]:
        """Tell named blocks from all others."""
        full: NDArray[np.bool_] = self.many_filled[slots] == self.block_size
        return full

    def forget(self, slots: Slots) -> None:
        self.many_parents[slots] = NOT_NAMED
        self.many_filled[slots] = 0
        if self.exact:
            for block in slots.tolist():
                self.exact.pop(block, None)

    def clear(self) -> None:
        self.exact.clear()
        self.many_parents[:] = NOT_NAMED
        self.many_filled[:] = 0

    def check(self) -> None:
        """Verify every invariant; AssertionError says which one does not hold."""
        findable = {block for block, parent in enumerate(self.parent) if parent != NOT_NAMED}
        assert findable == {block for block, tokens in enumerate(self.filled) if tokens}, "found without a parent"
        assert min(self.filled) >= 0 and max(self.filled) <= self.block_size, "more or less is filled than a block"
        assert max(self.parent) <= self.last_identity, "a parent's identity was never given"
        assert self.exact.keys() <= findable, "extra keys of a block that cannot be found"

    def check_copies(self, first: int, copies: list[int]) -> None:
        for copy in copies:
            assert self.identity[copy] == self.identity[first], f"blocks {copy} and {first} differ in identity"
            assert self.parent[copy] == self.parent[first], f"blocks {copy} and {first} differ in their parent"
            assert self.tokens[copy] == self.tokens[first], f"blocks {copy} and {first} differ in tokens"
            assert self.exact.get(copy) == self.exact.get(first), f"blocks {copy} and {first} differ in extra keys"
