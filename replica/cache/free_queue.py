"""Free blocks, in the order in which they are handed out."""

from array import array
from collections.abc import Iterator, Sequence

import numpy as np

from replica.cache.names import Slots


class FreeQueue:
    """A ring through the numbers of the blocks, with `num_blocks` as its end.

    The links are in memory seen in two ways: `array` is faster for one block, numpy (`_many`) for several.
    """

    def __init__(self, num_blocks: int) -> None:
        self.length = num_blocks
        self._end = num_blocks
        self._next = array("i", [*range(1, num_blocks + 1), 0])
        self._previous = array("i", [num_blocks, *range(num_blocks)])
        self._many_next = np.frombuffer(self._next, np.int32)
        self._many_previous = np.frombuffer(self._previous, np.int32)

    def __iter__(self) -> Iterator[int]:
        block = self._next[self._end]
        while block != self._end:
            yield block
            block = self._next[block]

    def pop(self, count: int) -> list[int]:
        """Remove the first blocks; the caller has made sure that there are enough."""
        following = self._next
        block = self._end
        blocks = [block := following[block] for _ in range(count)]
        after = following[block]
        following[self._end] = after
        self._previous[after] = self._end
        self.length -= count
        return blocks

    def remove(self, blocks: Sequence[int]) -> None:
        following, previous = self._next, self._previous
        for block in blocks:
            before, after = previous[block], following[block]
            following[before] = after
            previous[after] = before
        self.length -= len(blocks)

    def append(self, slots: Slots) -> None:
        """Hand these out last."""
        self._link(self._previous[self._end], slots, self._end)

    def prepend(self, slots: Slots) -> None:
        """Hand these out first."""
        self._link(self._end, slots, self._next[self._end])

    def _link(self, before: int, slots: Slots, after: int) -> None:
        if not len(slots):
            return
        ring = np.concatenate(([before], slots, [after]))
        self._many_next[ring[:-1]] = ring[1:]
        self._many_previous[ring[1:]] = ring[:-1]
        self.length += len(slots)

    def check(self) -> None:
        """Verify every invariant; AssertionError says which one does not hold."""
        queue = list(self)
        assert len(queue) == len(set(queue)) == self.length, f"{len(queue)} blocks queue, {self.length} are counted"
        backwards = [self._end, *queue]
        assert [self._previous[block] for block in [*queue, self._end]] == backwards, "the queue's links disagree"
