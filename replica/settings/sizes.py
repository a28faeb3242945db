"""The memory that is free for blocks: the machine's, or less where a container may have less."""

from contextlib import suppress
from pathlib import Path

HOST_SHARE = 0.1  # several replicas may share the machine
UNLIMITED = 2**60
ROOT = Path("/")


def free_bytes(root: Path = ROOT) -> int:
    """Return the bytes that are free for this process, by the kernel and every control group that it is in."""
    fields = (line.partition(":") for line in (root / "proc/meminfo").read_text().splitlines())
    available = (int(rest.split()[0]) * 1024 for name, _, rest in fields if name == "MemAvailable")
    left = [UNLIMITED]  # the room in each open control group
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        base = root / "sys/fs/cgroup" / controllers
        group = base / path.lstrip("/")
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        # The path may be the host's in a container, which is not to be seen here: the base is the container's own.
        for folder in {group, base, *(parent for parent in group.parents if parent.is_relative_to(base))}:
            with suppress(OSError, ValueError):  # there is no such file, or "max" stands in it
                limit, used = (int((folder / name).read_text()) for name in names)
                if limit < UNLIMITED:
                    left.append(limit - used)
    return max(0, min(*available, *left))
