"""A fleet in this process; small servers in processes of their own stand for the replicas."""

import asyncio
import os
import re
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fleet.child import Log
from fleet.local import CannotStart, LocalFleet, Plan
from router.config import RouterConfig

DEADLINE_S = 20.0

# While its gate exists, a FIFO, it is not ready before something was written there.
STUB = """
import http.server, os, sys, time
gate, ports = sys.argv[1:]
print("Note: I am a stub")
if ports == "1":
    sys.exit("Error: the engine cannot start: cannot bind tcp://127.0.0.1:1: Address already in use")
if os.path.exists(gate):
    open(gate).read()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b"%d" % os.getpid()
        if self.path == "/load":
            body = b'{"model": "stub", "block_size": 16, "max_model_len": 64, "tokenizer": "stub", "incarnation": 1}'
        endless = self.path == "/v1/endless"
        self.send_response(200)
        self.send_header("content-length", str(len(body) + endless))
        self.end_headers()
        self.wfile.write(body)
        if endless:
            time.sleep(3600)
    def log_message(self, *_): ...
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
port = server.server_port
print(f"ready on http://127.0.0.1:{port}, model stub, 8 blocks of 16, events off", flush=True)
server.serve_forever()
"""


class Fleet:
    """A running LocalFleet of stubs, and what it says."""

    def __init__(self, folder: Path, ports: Iterator[int], drain_timeout_s: float = 60.0) -> None:
        self.folder = folder
        self.said: list[str] = []
        self.broken = False  # whether what is said leads nowhere
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.logs = [Log(folder / f"{name}.log") for name in "ab"]
        plans = [Plan(name, self.command(name), log) for name, log in zip("ab", self.logs, strict=True)]
        router = RouterConfig(drain_timeout_s=drain_timeout_s, slow_start_s=0.0)
        self.local = LocalFleet(plans, lambda: next(ports), listener, self.say, router)

    def command(self, name: str) -> Callable[[int], list[str]]:
        return lambda ports: [sys.executable, "-c", STUB, str(self.gate(name)), str(ports)]

    def gate(self, name: str) -> Path:
        return self.folder / f"gate-{name}"

    def say(self, text: str) -> None:
        self.said.append(text)

    def count(self, text: str) -> int:
        return sum(line.count(text) for line in self.said)

    async def until_said(self, text: str, times: int = 1) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while self.count(text) < times:
                await asyncio.sleep(0.01)

    async def pids(self) -> set[int]:
        """Of those that answer."""
        return {int(await asyncio.to_thread(self.ask)) for _ in range(4)}

    def ask(self) -> bytes:
        with urllib.request.urlopen(self.url + "/v1/anything", timeout=DEADLINE_S) as answer:
            body: bytes = answer.read()
        return body


def no_ports() -> Iterator[int]:
    while True:
        yield 0


@asynccontextmanager
async def running(
    folder: Path, ports: Iterator[int] | None = None, drain_timeout_s: float = 60.0
) -> AsyncIterator[Fleet]:
    fleet = Fleet(folder, ports or no_ports(), drain_timeout_s)
    task = asyncio.create_task(fleet.local.run(lambda _: fleet.say("announced")))
    try:
        await fleet.until_said("announced")
        yield fleet
    finally:
        if not fleet.local._ending.is_set():
            fleet.local.stop()
        await task
        for log in fleet.logs:
            log.close()


async def test_a_replica_that_dies_is_passed_over_until_it_is_ready_again(tmp_path: Path) -> None:
    async with running(tmp_path) as fleet:
        before = await fleet.pids()
        assert len(before) == 2
        os.mkfifo(fleet.gate("a"))
        os.mkfifo(fleet.gate("b"))
        victim = min(before)
        os.kill(victim, signal.SIGKILL)
        await fleet.until_said("is started again")
        assert await fleet.pids() == before - {victim}
        name = re.search(r"(\w) was killed by SIGKILL", fleet.said[-1])
        assert name is not None
        await asyncio.to_thread(fleet.gate(name[1]).write_text, "go on")
        await fleet.until_said("is ready after", times=3)
        async with asyncio.timeout(DEADLINE_S):
            while not await fleet.pids() - before:
                await asyncio.sleep(0.01)
    assert fleet.local.failed


async def test_the_folder_of_the_logs_may_vanish(tmp_path: Path) -> None:
    async with running(tmp_path) as fleet:
        for name in "ab":
            (tmp_path / f"{name}.log").unlink()
        os.kill(min(await fleet.pids()), signal.SIGKILL)
        await fleet.until_said("is ready after", times=3)
        assert fleet.count("  | ready on http://") == 1  # its last words were read


async def test_ports_that_somebody_else_took_first_are_left_for_the_next_ones(tmp_path: Path) -> None:
    async with running(tmp_path, iter([1, 5, 1, 9])) as fleet:
        assert len(await fleet.pids()) == 2
    assert not fleet.local.failed


async def test_ports_that_are_always_taken_are_an_error(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, iter([1] * 99))
    with pytest.raises(CannotStart, match=r"(?s)before it was ready.*cannot bind"):
        await fleet.local.run(lambda _: None)
    for log in fleet.logs:
        log.close()


async def test_what_replicas_note_is_said_once(tmp_path: Path) -> None:
    async with running(tmp_path) as fleet:
        assert fleet.count("Note: I am a stub") == 1


async def test_an_end_is_an_end_even_if_it_cannot_be_said(tmp_path: Path) -> None:
    async with running(tmp_path) as fleet:

        def broken(_: str) -> None:
            raise OSError("the terminal is gone")

        fleet.local._say = broken
        with pytest.raises(OSError, match="gone"):
            fleet.local.stop()
        assert fleet.local._ending.is_set()


async def test_a_request_that_is_cut_is_said_with_the_limit(tmp_path: Path) -> None:
    async with running(tmp_path, drain_timeout_s=0.3) as fleet:
        host, port = fleet.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /v1/endless HTTP/1.1\r\nhost: f\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        begun_s = time.monotonic()
        fleet.local.stop()
        await fleet.until_said("Running requests that were cut after 0.3 s; --drain-timeout sets this limit: 1")
        assert time.monotonic() - begun_s < 10
        writer.transport.abort()


def ask_router(fleet: Fleet, method: str, path: str, body: bytes | None = None) -> int:
    asked = urllib.request.Request(fleet.url + path, body, {"host": "localhost"}, method=method)
    try:
        with urllib.request.urlopen(asked, timeout=DEADLINE_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


async def test_no_request_to_the_router_takes_a_replica_from_its_keeper(tmp_path: Path) -> None:
    async with running(tmp_path) as fleet:
        assert await asyncio.to_thread(ask_router, fleet, "DELETE", "/replicas/a") == 409
        os.mkfifo(fleet.gate("a"))
        os.mkfifo(fleet.gate("b"))
        os.kill(min(await fleet.pids()), signal.SIGKILL)
        await fleet.until_said("is started again")
        name = re.search(r"(\w) was killed by SIGKILL", fleet.said[-1])
        assert name is not None
        taken = b'{"name": "%b", "url": "http://127.0.0.1:1"}' % name[1].encode()
        assert await asyncio.to_thread(ask_router, fleet, "POST", "/replicas", taken) == 201
        await asyncio.to_thread(fleet.gate(name[1]).write_text, "go on")
        await fleet.until_said("is ready after", times=3)
        async with asyncio.timeout(DEADLINE_S):
            while len(await fleet.pids()) < 2:
                await asyncio.sleep(0.01)
