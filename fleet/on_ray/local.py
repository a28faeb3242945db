"""A small Ray of our own on this machine: on loopback only, and ended with this process."""

import os
import stat
from contextlib import suppress
from pathlib import Path

from fleet.on_ray.cleanup import processes
from fleet.on_ray.settings import LOOPBACK, local_environment

LONGEST_SOCKET = 107  # bytes of a Unix socket's path
OPEN_TO_ALL = "s"  # Ray's own folder, in a private one
SESSION = f"/{OPEN_TO_ALL}/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
OBJECT_STORE_BYTES = 75 * 1024 * 1024  # the least that Ray takes; nothing is kept there
GCS, RAYLET = "gcs_server", "raylet"
CPUS = 1000  # no limit: the user decides how many replicas one machine takes


def private_folder(folder: Path) -> Path:
    """Return this folder if other users cannot enter it, else one in it; PermissionError if that is somebody else's.

    Ray opens each of its own folders to everybody (mode 0777), so that any user could plant a link in place of a log.
    """
    folder.mkdir(0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid == os.geteuid() and not found.st_mode & 0o077:
        return folder
    inner = folder / "ray"
    with suppress(FileExistsError):
        inner.mkdir(0o700)
    found = inner.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"{str(inner)!r} is no folder of this user; remove it, or choose another --log-dir")
    inner.chmod(0o700)
    return inner


def too_long(folder: Path) -> str | None:
    """Say why a folder is too long for Ray's sockets; None if it is not."""
    most = LONGEST_SOCKET - len(SESSION)
    length = len(os.fsencode(folder))
    if length <= most:
        return None
    return (
        f"{str(folder)!r} is too long a folder for Ray's sockets: {length} bytes, {most} at most; set a shorter TMPDIR"
    )


def set_environment() -> None:
    """To be called before Ray is imported; no setting of another Ray in the environment counts."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        del os.environ[name]
    os.environ.update(local_environment())


def init(folder: Path) -> None:
    """Start it below this private folder; blocks for some seconds."""
    import ray
    from ray._private.node import Node

    # Ray's log monitor, autoscaler and dashboard have nothing to do here, and no switch; together 150 MB, and a second.
    for name in ("start_monitor", "start_log_monitor", "start_api_server"):
        if hasattr(Node, name):
            setattr(Node, name, lambda *_, **__: None)
    ray.init(
        "local",
        num_cpus=CPUS,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=OBJECT_STORE_BYTES,
        _node_ip_address=LOOPBACK,
        _temp_dir=str(folder / OPEN_TO_ALL),
    )


def servers() -> dict[str, int]:
    """The pids of Ray's own that this process has started: without any one of them there is no Ray."""
    found = {program(each.pid): each.pid for each in processes() if each.parent == os.getpid() and each.state != "Z"}
    return {name: found[name] for name in (GCS, RAYLET) if name in found}


def program(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return os.path.basename(os.fsdecode(command.partition(b"\0")[0]))
