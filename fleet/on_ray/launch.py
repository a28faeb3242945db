"""`python -m fleet.on_ray.launch`, the child of `warmroute up`: has a controller in its own Ray, or in a given one.

Reads one Order from stdin and answers with Launched or Trouble on stdout, a line of JSON each. With a Ray of its own it
stays until stdin ends or a signal comes; one that it has joined goes on without it.
"""

import asyncio
import os
import re
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from api.process.lifeline import die_with_parent, parent_pid
from fleet.on_ray.cleanup import kill_session, lead_a_session, processes, watch_over
from fleet.on_ray.orders import Launched, Order, Trouble, decode_order, encode
from fleet.on_ray.settings import LOOPBACK, joined_environment, local_environment

CONNECT_S = 3.0
JOIN_S = 15.0  # Ray waits forever if the token is wrong
BEGIN_S = 60.0  # the time for the controller's actor: a node may have to load much to start it
SHUTDOWN_S = 2.0
TRIES = 3  # to find a controller that does not just end
AGAIN_S = 0.5
LONGEST_SOCKET = 107  # bytes of a Unix socket's path
OPEN_TO_ALL = "s"  # Ray's own folder, in a private one
SESSION = f"/{OPEN_TO_ALL}/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
OBJECT_STORE_BYTES = 75 * 1024 * 1024  # the least that Ray takes; nothing is kept there
GCS, RAYLET = "gcs_server", "raylet"
CPUS = 1000  # no limit: the user decides how many replicas one machine takes


class LaunchFailed(Exception):
    """The message is one line for the user."""


def main() -> None:
    session = lead_a_session()
    die_with_parent(parent_pid())
    watch_over(session)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # stdout is for answers alone: Ray and its children print to stderr
    try:
        order = decode_order(sys.stdin.buffer.readline())
    except msgspec.MsgspecError as error:
        _give_up(answers, f"the order cannot be read: {error}")
    try:
        if order.address is None:
            _run_local(order, answers, session)
        address = order.address
        os.environ.update(joined_environment(os.environ))
        fix = f"set RAY_AUTH_MODE (it is {os.environ['RAY_AUTH_MODE']} here) and RAY_AUTH_TOKEN as they are there"
        check_address(address)
        refused = f"the Ray at {address!r} does not accept this client within {JOIN_S:g} s; {fix}"
        hangs = threading.Timer(JOIN_S, _give_up, (answers, refused))
        hangs.start()
        connect(order, address, fix)
        hangs.cancel()
        answers.write(encode(begin(order)) + b"\n")
        _shut_down()
        os._exit(0)
    except LaunchFailed as error:
        _give_up(answers, str(error))
    except Exception as error:  # Ray raises all manner of things
        with suppress(OSError):  # the disk of the launcher's log may be full
            print(traceback.format_exc(), file=sys.stderr, flush=True)
        what = "Ray cannot start here" if order.address is None else f"the Ray at {order.address!r} cannot be joined"
        _give_up(answers, f"{what}: {one_line(error)}")


def _give_up(answers: Any, message: str) -> NoReturn:
    with suppress(BrokenPipeError):
        answers.write(encode(Trouble(message=" ".join(message.split()))) + b"\n")
    kill_session(os.getsid(0), but=os.getpid())
    os._exit(1)


# ---- a Ray of our own


def _run_local(order: Order, answers: Any, session: int) -> NoReturn:
    given = Path(order.temp_dir or tempfile.mkdtemp(prefix="warmroute-ray-"))
    try:
        if (why := too_long(given) or too_long(folder := private_folder(given))) is not None:
            raise LaunchFailed(why)
    except PermissionError as error:
        raise LaunchFailed(str(error)) from error
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        del os.environ[name]  # Ray, which is imported below, reads them, and no setting of another Ray counts
    os.environ.update(local_environment())
    init(folder)
    launched = begin(order)
    answers.write(encode(launched) + b"\n")
    over = asyncio.run(until_the_end(servers()))
    if over is not None:
        raise LaunchFailed(f"Ray's {over} has died; its logs are in {launched.logs}")
    _shut_down()
    kill_session(session, but=os.getpid())
    os._exit(0)


async def until_the_end(pids: Mapping[str, int]) -> str | None:
    """Return the one of Ray's servers (`pids`) that has died; None when asked to end. Without any there is no Ray."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Queue[str | None] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.put_nowait, None)
    for name in (GCS, RAYLET):
        try:
            loop.add_reader(os.pidfd_open(pids[name]), ended.put_nowait, name)
        except (KeyError, ProcessLookupError):  # it has died before anybody could look
            return name

    def read_to_the_end() -> None:
        sys.stdin.buffer.read()
        loop.call_soon_threadsafe(ended.put_nowait, None)

    threading.Thread(target=read_to_the_end, daemon=True).start()
    return await ended.get()


def _shut_down() -> None:
    """Shut Ray down; the caller kills what does not end in time."""
    import ray

    ending = threading.Thread(target=ray.shutdown, daemon=True)
    ending.start()
    ending.join(SHUTDOWN_S)


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


# ---- a given Ray


def check_address(address: str) -> None:
    if "://" in address:
        raise LaunchFailed(f"{address!r} is not the address of a GCS; give HOST:PORT, usually with port 6379")
    host, _, port = address.rpartition(":")
    if address == "auto":
        return
    if not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise LaunchFailed(f"{address!r} is not the address of a Ray; give HOST:PORT, usually with port 6379, or auto")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except OSError as error:
        reason = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise LaunchFailed(
            f"no Ray answers at {address!r}: {reason}; start one there with `ray start --head`"
        ) from error


def connect(order: Order, address: str, fix: str) -> None:
    import ray
    from ray.exceptions import RayError

    try:
        ray.init(address, namespace=order.namespace, log_to_driver=False)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        raise LaunchFailed(f"the Ray at {address!r} cannot be joined: {explained(error, fix)}") from error


def explained(error: Exception, fix: str) -> str:
    text = one_line(error)
    if "ersion mismatch" in text:
        versions = [" and Python ".join(found) for found in re.findall(r"Ray: (\S+)\s+Python: (\S+)", text)]
        return f"it has Ray {versions[0]}, and here is Ray {versions[-1]}; have the same" if versions else text
    if "Failed to connect to Ray cluster" in text:  # a server answers there, as was checked before
        return f"it lets nobody in; {fix}"
    if "Could not find any running Ray instance" in text:
        return "there is none on this machine; start one with `ray start --head`"
    if "node" in text and ("not find" in text or "expects this IP" in text):
        return f"this machine is not one of its nodes; run `ray start --address=...` here, or use another node ({text})"
    return text


# ---- the controller


def begin(order: Order) -> Launched:
    """Start a controller with this plan, or give the plan to a running one."""
    import ray
    from ray.exceptions import ActorDiedError, GetTimeoutError, RayError

    from fleet.on_ray import controller
    from fleet.on_ray.cluster import log_folder
    from fleet.on_ray.hosts import last_line

    for attempt in range(TRIES):
        found = controller.there(order.namespace)
        actor = found or controller.make(order.namespace, order.port, order.key)
        try:
            begun = controller.decode_begun(ray.get(actor.begun.remote(), timeout=BEGIN_S))
            if begun.trouble:
                ray.kill(actor)
                raise LaunchFailed(begun.trouble)
            if found is None or not order.again:
                ray.get(actor.want.remote(controller.encode_plan(order.plan)), timeout=BEGIN_S)
        except ActorDiedError as error:
            if attempt == TRIES - 1 or error.actor_init_failed:
                raise LaunchFailed(f"the controller cannot begin: {last_line(error)}") from error
            time.sleep(AGAIN_S)  # it was about to end
            continue
        except GetTimeoutError as error:
            ray.kill(actor, no_restart=False)  # the next launcher finds another one
            raise LaunchFailed(
                f"the controller did not begin within {BEGIN_S:g} s; is Ray's head node alive?"
            ) from error
        except RayError as error:
            raise LaunchFailed(f"the controller cannot begin: {last_line(error)}") from error
        return Launched(
            controller=begun.url,
            address=ray.get_runtime_context().gcs_address,
            logs=str(log_folder()),
            found=found is not None,
        )
    raise AssertionError("the last try returns or raises")


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


if __name__ == "__main__":
    main()
