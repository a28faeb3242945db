"""The memory that is free for blocks: the machine's, or less where a container may have less."""

from collections.abc import Iterator
from pathlib import Path

HOST_SHARE = 0.1  # several replicas may share the machine
UNLIMITED = 2**60
ROOT = Path("/")


def free_bytes(root: Path = ROOT) -> int:
    """Return the bytes that are free for this process, by the kernel and every control group that it is in."""
    return max(0, min(_available(root), *_left_in_groups(root), UNLIMITED))


def _available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return UNLIMITED


def _left_in_groups(root: Path) -> Iterator[int]:
    yield UNLIMITED
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        base = root / "sys/fs/cgroup" / controllers
        group = base / path.lstrip("/")
        # The path may be the host's in a container, which is not to be seen here: the base is the container's own.
        for folder in {group, base, *(parent for parent in group.parents if parent.is_relative_to(base))}:
            names = ("memory.max", "memory.current") if not controllers else MEMORY_V1
            limit, used = (_number(folder / name) for name in names)
            if limit is not None and used is not None and limit < UNLIMITED:
                yield limit - used


MEMORY_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
