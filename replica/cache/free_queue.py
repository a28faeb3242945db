"""Free blocks, in the order in which they are handed out.

Those in front go first. Of the others the least recently used goes, but blocks that nobody has used again age faster:
so a flood of prompts that never come again, whoever sends it, takes little of what others come back to.
"""

from array import array
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from replica.cache.names import Slots

FASTER = 8


class FreeQueue:
    """Rings through the numbers of the blocks: those in front, used once, and used again, with an end each.

    `again` tells blocks that are used again when they are appended; None: the order is that of their use. The links are
    in memory seen in two ways: `array` is faster for one block, numpy (`_many`) for several.
    """

    def __init__(self, num_blocks: int, again: NDArray[np.bool_] | None = None) -> None:
        self.length = num_blocks
        self._again: NDArray[np.bool_] = np.zeros(num_blocks, np.bool_) if again is None else again
        self._end = num_blocks
        self._next = array("i", [*range(1, num_blocks + 1), 0, num_blocks + 1, num_blocks + 2])
        self._previous = array("i", [num_blocks, *range(num_blocks), num_blocks + 1, num_blocks + 2])
        self._many_next = np.frombuffer(self._next, np.int32)
        self._many_previous = np.frombuffer(self._previous, np.int32)
        self._now = 0  # a time that goes on with each block that comes or is handed out
        self._since: NDArray[np.int64] = np.zeros(num_blocks + 3, np.int64)  # when a block came

    def __iter__(self) -> Iterator[int]:
        following, since, now = self._next, self._since, self._now
        block = following[self._end]
        while block != self._end:
            yield block
            block = following[block]
        once, again = following[self._end + 1 :]
        while once <= self._end or again <= self._end:
            if again > self._end or (once < self._end and FASTER * (now - since[once]) >= now - since[again]):
                yield once
                once = following[once]
            else:
                yield again
                again = following[again]

    def pop(self, count: int) -> list[int]:
        """Remove the first blocks; the caller has made sure that there are enough."""
        blocks = list(islice(self, count))
        self.remove(blocks)
        self._now += count
        return blocks

    def remove(self, blocks: Sequence[int]) -> None:
        following, previous = self._next, self._previous
        for block in blocks:
            before, after = previous[block], following[block]
            following[before] = after
            previous[after] = before
        self.length -= len(blocks)

    def append(self, slots: Slots) -> None:
        """Hand these out last, of those that were used as often."""
        self._since[slots] = np.arange(self._now, self._now + len(slots))
        self._now += len(slots)
        for is_again in False, True:
            end = self._end + 1 + is_again
            self._link(self._previous[end], slots[self._again[slots] == is_again], end)

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
        queue = list(islice(self, self.length + 1))
        assert len(queue) == len(set(queue)) == self.length, f"{len(queue)} blocks queue, {self.length} are counted"
        assert [self._next[self._previous[block]] for block in queue] == queue, "the queue's links disagree"
