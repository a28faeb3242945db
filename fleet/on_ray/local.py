"""A Ray of our own on this machine: as small as it gets, on loopback alone, and gone with this process."""

import os
from pathlib import Path

from fleet.on_ray.remains import processes
from fleet.on_ray.settings import LOOPBACK

LONGEST_SOCKET = 107  # bytes of a Unix socket's path
SESSION = "/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
OBJECT_STORE_BYTES = 75 * 1024 * 1024  # the least that Ray takes; nothing is kept there
SERVERS = ("gcs_server", "raylet")
CPUS = 1000  # whoever starts a fleet on one machine says himself how many replicas it can take


def too_long(folder: str) -> str | None:
    """Why Ray's sockets cannot be in this folder."""
    most = LONGEST_SOCKET - len(SESSION)
    length = len(os.fsencode(folder))
    if length <= most:
        return None
    return f"{folder!r} is too long a folder for Ray's sockets: {length} bytes, {most} at most; set a shorter TMPDIR"


def init(folder: Path) -> None:
    """Blocks for some seconds."""
    import ray
    from ray._private.node import Node

    # Ray's log monitor, autoscaler and dashboard have nothing to do here, and no switch; together 150 MB, and a second.
    for name in ("start_monitor", "start_log_monitor", "start_api_server"):
        if hasattr(Node, name):
            setattr(Node, name, _nothing)
    ray.init(
        num_cpus=CPUS,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=OBJECT_STORE_BYTES,
        _node_ip_address=LOOPBACK,
        _temp_dir=str(folder),
    )


def _nothing(*_: object, **__: object) -> None:
    pass


def servers() -> list[int]:
    """Ray's that this process has started: without any one of them there is no Ray."""
    return [each.pid for each in processes() if each.parent == os.getpid() and program(each.pid) in SERVERS]


def program(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return os.path.basename(os.fsdecode(command.partition(b"\0")[0]))
