"""The sizes of steps that graphs are captured for: a step takes the smallest one it fits in.

Those in which all decode are measured in requests, and those with prompts in rows. Beyond MIXED_ROWS a step should keep
the GPU busy for longer than the host takes to launch its kernels.
"""

from bisect import bisect_left

SMALLEST = (1, 2, 4, 8)
EVERY = 8  # up to EVEN, then twice as far apart
EVEN = 256
MIXED_ROWS = 512
MIXED = (16, *range(32, 256, 32), *range(256, MIXED_ROWS, 64))
MIXED_PROMPTS = 8  # in a step, at most: what a graph has room for, its kernels look at


def decode_sizes(largest: int) -> tuple[int, ...]:
    sizes = (*SMALLEST, *range(2 * EVERY, EVEN + 1, EVERY), *range(EVEN + 2 * EVERY, largest, 2 * EVERY))
    return (*(size for size in sizes if size < largest), largest)


def mixed_sizes(rows: int) -> tuple[int, ...]:
    """The sizes of steps with prompts, of at most so many rows."""
    largest = min(rows, MIXED_ROWS)
    return (*(size for size in MIXED if size < largest), largest)


def size_for(sizes: tuple[int, ...], wanted: int) -> int | None:
    """None: more than the largest."""
    place = bisect_left(sizes, wanted)
    return sizes[place] if place < len(sizes) else None
