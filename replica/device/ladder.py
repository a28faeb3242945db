"""The batch sizes that graphs are captured for: a step that only decodes takes the smallest one it fits in."""

from bisect import bisect_left

SMALLEST = (1, 2, 4, 8)
EVERY = 8  # up to EVEN, then twice as far apart
EVEN = 256


def ladder(largest: int) -> tuple[int, ...]:
    sizes = (*SMALLEST, *range(2 * EVERY, EVEN + 1, EVERY), *range(EVEN + 2 * EVERY, largest, 2 * EVERY))
    return (*(size for size in sizes if size < largest), largest)


def rung(sizes: tuple[int, ...], requests: int) -> int | None:
    """None: more than the largest."""
    place = bisect_left(sizes, requests)
    return sizes[place] if place < len(sizes) else None
