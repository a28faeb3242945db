"""The sizes of steps that graphs are captured for: a step takes the smallest one it fits in.

Those in which all decode are measured in requests, and those with prompts in rows. Where a step keeps the GPU busy for
longer than the host takes to launch its kernels, no graph is needed, and rows that fill it up would cost time.
"""

from bisect import bisect_left

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
