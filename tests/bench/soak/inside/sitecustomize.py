"""Imported by every Python process of a soak with --inside: writes at intervals what holds the process's memory.

It is no part of the product: it needs only a folder in PYTHONPATH and three environment variables.
"""

import atexit
import ctypes
import gc
import os
import sys
import threading
import time
import tracemalloc
from collections import Counter
from pathlib import Path

FOLDER, EVERY_S = Path(os.environ["SOAK_INSIDE"]), float(os.environ["SOAK_EVERY_S"])
TRACED = int(os.environ.get("SOAK_FRAMES", "0"))
MOST = 40
MALLINFO = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class Mallinfo(ctypes.Structure):
    """glibc's statistics of its main arena and of mmap, in bytes."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in MALLINFO)


def allocators() -> str:
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Mallinfo
    found = libc.mallinfo2()
    said = ", ".join(f"{name} {getattr(found, name) / 1e6:.2f} MB" for name in MALLINFO)
    return f"malloc: {said}\npymalloc blocks: {sys.getallocatedblocks():,}"


def resident() -> str:
    return " ".join(Path("/proc/self/smaps_rollup").read_text().split("\n")[i] for i in (1, 2)) + "\n"


def types() -> str:
    counted = Counter(type(one).__qualname__ for one in gc.get_objects())
    collected = f"collections: {[one['collections'] for one in gc.get_stats()]}, counts: {gc.get_count()}"
    return "\n".join((collected, *(f"{count:>9,} {name}" for name, count in counted.most_common(MOST))))


def traced() -> str:
    if not tracemalloc.is_tracing():
        return ""
    statistics = tracemalloc.take_snapshot().statistics("lineno" if TRACED == 1 else "traceback")
    lines = [f"{tracemalloc.get_traced_memory()[0] / 1e6:.2f} MB traced"]
    for one in statistics[:MOST]:
        where = " < ".join(f"{frame.filename[-40:]}:{frame.lineno}" for frame in reversed(one.traceback))
        lines.append(f"{one.size / 1e3:>10,.1f} kB {one.count:>8,} {where}")
    return "\n".join(lines)


def arenas(file: Path) -> None:
    """Write malloc_info's XML, with the totals of every arena, to a file."""
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    opened = libc.fopen(str(file).encode(), b"w")
    libc.malloc_info(0, ctypes.c_void_p(opened))
    libc.fclose(ctypes.c_void_p(opened))


def report(began_s: float) -> None:
    command = Path(sys.argv[1]).name if len(sys.argv) > 1 else "python"
    name = f"{command}-{os.getpid()}"
    while True:
        time.sleep(EVERY_S)
        at = f"{(time.monotonic() - began_s) / 60:07.2f}"
        said = "\n\n".join((resident(), allocators(), types(), traced()))
        (FOLDER / f"{name}-{at}.txt").write_text(said)
        arenas(FOLDER / f"{name}-{at}.xml")


if TRACED:
    tracemalloc.start(TRACED)
    atexit.register(tracemalloc.stop)
threading.Thread(target=report, args=(time.monotonic(),), daemon=True).start()
