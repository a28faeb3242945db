"""Whole replicas as users run them, and their traces in the system: processes, ports, files."""

import asyncio
import ctypes
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.events.processes import DEADLINE_S, wait_until
from tests.processes import children, is_alive
from tests.replica.serving import MODEL, Replica

GONE_WITHIN_S = 2.0
PR_SET_CHILD_SUBREAPER = 36
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
DEMO = ("--model", MODEL, "--engine", "simulated")


class Command(Replica):
    """`warmroute replica` on ports of its own choice or ours, with a folder of its own for temporary files."""

    def __init__(
        self,
        *options: object,
        host: str = "127.0.0.1",
        port: int = 0,
        events_port: int = 0,
        program: Sequence[str] = ("-m", "fleet"),
    ) -> None:
        self.host = host
        self.folder = Path(tempfile.mkdtemp(prefix="chaos-"))
        self._given_port = port
        ports = ("--host", host, "--events-host", host, "--port", port, "--events-port", events_port)
        command = [sys.executable, *program, "replica", *DEMO, *ports, *options]
        self._start([*map(str, command)], TMPDIR=str(self.folder))

    @property
    def port(self) -> int:
        return self._given_port or super().port

    def signal(self, number: int, *, engine: bool = False) -> None:
        os.kill(self.engine_pid if engine else self.process.pid, number)

    def error_text(self) -> str:
        return "".join(self.err)


@contextmanager
def command(*options: object, ready: bool = True, **how: Any) -> Iterator[Command]:
    """Run a replica; always end it and remove its folder."""
    running = Command(*options, **how)
    try:
        if ready:
            running.wait_ready()
        yield running
    finally:
        for pid in children(running.process.pid):
            os.kill(pid, 9)
        running.process.kill()
        running.end(None)
        for path in sorted(running.folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        running.folder.rmdir()


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Adopt orphaned processes as this process's children, so that none can hide (Linux)."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def wait_gone(*pids: int) -> float:
    """Wait until none of them runs; return the seconds it took."""
    began_s = time.monotonic()
    wait_until(lambda: not any(map(is_alive, pids)), f"{pids} are gone")
    return time.monotonic() - began_s


async def until(condition: Callable[[], object], what: str) -> None:
    """Wait like `wait_until`, without blocking the event loop."""
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, f"timed out after {DEADLINE_S:g} s: {what}"
        await asyncio.sleep(0.01)


# ---- ports


def free_ports(count: int) -> int:
    """Return the first of `count` consecutive free loopback ports."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            first: int = probe.getsockname()[1]
        if first + count < 65536 and all(can_bind(port) for port in range(first, first + count)):
            return first


def can_bind(port: int) -> bool:
    """Return True if a server with SO_REUSEADDR could listen on the port now."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


# ---- resources of a process


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


def cpu_s(pid: int) -> float:
    """User and system time of all its threads so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S
