"""A small Ray of our own on this machine: on loopback only, and ended with this process."""

import os
import stat
import threading
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fleet.on_ray.cleanup import make_store, processes
from fleet.on_ray.settings import LOOPBACK, local_environment

LONGEST_SOCKET = 107  # bytes of a Unix socket's path
OPEN_TO_ALL = "s"  # Ray's own folder, in a private one
SESSION = f"/{OPEN_TO_ALL}/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
OBJECT_STORE_BYTES = 75 * 1024 * 1024  # the least that Ray takes; nothing is kept there
WITH_A_STORE = (2, 60)  # the first Ray whose GCS can keep its state on a disk
GCS, RAYLET = "gcs_server", "raylet"
_STARTING = threading.Lock()  # held while the node has no GCS
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


def set_environment(session: int) -> None:
    """To be called before Ray is imported; no setting of another Ray in the environment counts."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        del os.environ[name]
    major, minor = version("ray").split(".")[:2]
    keeps_a_store = (int(major), int(minor)) >= WITH_A_STORE
    os.environ.update(local_environment(make_store(session) if keeps_a_store else None))


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


def start_gcs_again() -> int:
    """Restart the GCS on its state and port; return its pid."""
    from ray._private import worker

    node: Any = worker._global_node
    with _STARTING:
        for died in node.all_processes.pop(GCS):
            died.process.wait()
        client, node._gcs_client, node._gcs_address = node._gcs_client, None, None  # `start_gcs_server` demands this
        try:
            node.start_gcs_server()
        finally:
            node._gcs_client = client
        pid: int = node.all_processes[GCS][0].process.pid
        return pid


def raylet_lives(within_s: float) -> bool | None:
    """True if the GCS counts the only node as alive, as it does for a minute after its raylet began to hang.

    None: the GCS does not answer.
    """
    from ray._private import worker
    from ray.exceptions import RayError

    node: Any = worker._global_node
    with _STARTING:  # else Ray would make a client of a GCS that is not there
        client = node.get_gcs_client()
    try:
        found = client.get_all_node_info(timeout=within_s)
    except RayError:
        return None
    return any(each.state == each.ALIVE for each in found.values())


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
