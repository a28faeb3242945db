"""Makes the C library return the memory of large bodies to the system."""

import ctypes
import sys

M_MMAP_THRESHOLD = -3  # malloc.h
MAPPED_BYTES = 64 * 1024


_C = ctypes.CDLL(None)


def give_back() -> None:
    """Return free memory within the C library's heap to the system."""
    if (trim := getattr(_C, "malloc_trim", None)) is not None:  # glibc has it
        trim(0)


def map_large_blocks() -> None:
    """Map each large block by itself, so that freeing it returns its memory.

    Otherwise glibc raises its threshold to the size of each such block that is freed, up to 32 MB: the next bodies come
    from its heap, which shrinks only from its end. The threshold is below what is read at once from a fast client; with
    256 KB the heap of a router under attack grew to 140 MB, with this to 27 MB.
    """
    if sys.platform == "linux" and (mallopt := getattr(_C, "mallopt", None)) is not None:  # glibc has it
        mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
