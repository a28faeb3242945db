"""The sizes of steps: of the largest there can be, and those that graphs are captured for."""

from bisect import bisect_left
from typing import NamedTuple

from kernels.adapters import most_tiles
from replica.device.inputs import Counts


class Size(NamedTuple):
    """The size of a graph: rows of decoding sequences, one each, or of any."""

    mixed: bool
    rows: int
    adapted: bool = False  # any row may have an adapter, which needs more work


class Limits(NamedTuple):
    """`rows` tokens of `requests` requests in a step, each of at most `tokens` in all."""

    rows: int
    requests: int
    tokens: int
    adapters: int = 0

    @property
    def largest(self) -> Counts:
        return self.counts(Size(True, self.rows, self.adapters > 0))

    def counts(self, size: Size) -> Counts:
        tiles = most_tiles(size.rows, self.adapters) if size.adapted else 0
        return Counts(size.rows, min(size.rows, self.requests), tiles)


# A step takes the smallest graph it fits in.
# Those in which all decode are measured in requests, and those with prompts in rows. Where a step keeps the GPU busy
# for longer than the host takes to launch its kernels, no graph is needed, and rows that fill it up would cost time.
SMALLEST = (1, 2, 4, 8)
EVERY = 8  # up to EVEN, then twice as far apart
EVEN = 256
MIXED = (16, *range(32, 256, 32), *range(256, 512, 64), *range(512, 1024, 128), *range(1024, 2048, 256), 2048)
LEAST_MIXED, MAX_MIXED = 512, 2048  # rows of the largest
WORK = 5 * 10**10  # parameters of a layer times rows, for which a GPU takes as long as the host for a layer's launches
MIXED_PROMPTS = 8  # the most in a step: a graph's kernels look at all that it has room for


def decode_sizes(largest: int) -> tuple[int, ...]:
    sizes = (*SMALLEST, *range(2 * EVERY, EVEN + 1, EVERY), *range(EVEN + 2 * EVERY, largest, 2 * EVERY))
    return (*(size for size in sizes if size < largest), largest)


def mixed_sizes(rows: int, layer: int) -> tuple[int, ...]:
    """The sizes of steps with prompts, of at most so many rows, for a layer of so many parameters."""
    largest = min(rows, max(LEAST_MIXED, min(MAX_MIXED, WORK // layer)))
    return (*(size for size in MIXED if size < largest), largest)


def size_for(sizes: tuple[int, ...], wanted: int) -> int | None:
    """None: more than the largest."""
    place = bisect_left(sizes, wanted)
    return sizes[place] if place < len(sizes) else None
