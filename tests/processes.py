"""Ask Linux about processes. One may end meanwhile: then it has no children, no files, and no command."""

import os
from contextlib import suppress
from pathlib import Path


def of_process(pid: int, file: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes()
    except OSError:  # it is gone, or a zombie
        return b""


def is_alive(pid: int) -> bool:
    return of_process(pid, "stat").rpartition(b")")[2].split()[:1] not in ([], [b"Z"])


def children(pid: int) -> list[int]:
    """The processes that its threads have started."""
    found: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, of_process(pid, f"task/{thread}/children").split())
    return found


def family(pid: int) -> list[int]:
    """A process and all that came from it, and from those: also what has left its session, as parts of Ray do."""
    found = [pid]
    for each in found:
        found += children(each)
    return found


def opened(pid: int) -> set[str]:
    """The paths of its descriptors, and `socket:[...]`."""
    found = set()
    with suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # it was closed meanwhile
                found.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    return found
