"""Slow, silent and endless connections to a router and to a replica: real processes, real sockets."""

import asyncio
import json
import resource
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest

from tests.chaos.replicas import command, open_files, resident_bytes
from tests.chaos.routers import router
from tests.events.processes import wait_until
from tests.hostile.attackers import FAST, HELLO, memory, posted
from tests.replica.serving import MODEL, Replica
from tests.router.scripted import CHAT, COMPLETIONS, connect

pytestmark = [pytest.mark.chaos, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

MEGABYTE = 2**20
GIGABYTE = 2**30
IDLE = 5000
SLOW = 200
SLOW_READERS = 10
BYTES_EACH = 40 * 1024  # of an idle connection
GROWTH = 64 * MEGABYTE
PATIENCE_S = 4.0  # nine in ten answers take less: the slow clients run beside it, in the same process
HEAD_LIMIT_S = 10.0
PROBE_EVERY_S = 0.05
ENOUGH = 20  # answers to another client


@pytest.fixture(scope="module")
def both() -> Iterator[dict[str, Replica]]:
    with (
        command(*FAST) as replica,
        router("--replica", replica.url, "--log-level", "warning", "--set=idle_timeout=3") as running,
    ):
        yield {"router": running, "replica": replica}
        for process in (replica, running):
            assert not any("Traceback" in line or " ERROR " in line for line in process.err), process.err


@pytest.fixture(params=["router", "replica"])
def server(both: dict[str, Replica], request: pytest.FixtureRequest) -> Replica:
    return both[request.param]


@asynccontextmanager
async def beside_a_neighbour(server: Replica) -> AsyncIterator[None]:
    """Fails where another client waits for long, or memory grows."""
    before = resident_bytes(server.process.pid)
    took_s: list[float] = []

    async def ask() -> None:
        async with connect(server.port) as client:
            while True:
                began_s = time.monotonic()
                client.write(posted(COMPLETIONS, HELLO))
                assert (await client.answer()).status == 200
                took_s.append(time.monotonic() - began_s)
                await asyncio.sleep(PROBE_EVERY_S)

    asking = asyncio.create_task(ask())
    try:
        yield
        async with asyncio.timeout(HEAD_LIMIT_S):
            while len(took_s) < ENOUGH and not asking.done():
                await asyncio.sleep(PROBE_EVERY_S)
    finally:
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking
    grown = resident_bytes(server.process.pid) - before
    print(f"{len(took_s)} answers, slowest {max(took_s) * 1000:.0f} ms; {grown / MEGABYTE:+.0f} MiB")
    assert sorted(took_s)[int(len(took_s) * 0.9)] < PATIENCE_S
    assert grown < GROWTH + IDLE * BYTES_EACH


async def all_gone(server: Replica, files: int) -> None:
    await asyncio.to_thread(
        wait_until, lambda: open_files(server.process.pid) < files + 20, "their connections are closed"
    )


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < IDLE + 500:
        pytest.skip(f"only {hard} files may be open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
async def test_five_thousand_idle_connections_cost_little_and_do_no_harm(both: dict[str, Replica]) -> None:
    server = both["router"]
    files, before = open_files(server.process.pid), resident_bytes(server.process.pid)
    idle: list[asyncio.StreamWriter] = []
    async with beside_a_neighbour(server):
        for number in range(IDLE):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            idle.append(writer)
            if number % 2:  # half of them have asked before, and are kept
                writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
                assert (await reader.readline()).split()[1] == b"200"
        each = (resident_bytes(server.process.pid) - before) / IDLE
    print(f"{each / 1024:.1f} KiB each")
    assert each < BYTES_EACH
    for writer in idle:
        writer.transport.abort()
    await all_gone(server, files)


async def trickle(client: Any, raw: bytes) -> None:
    for place in range(len(raw)):
        with suppress(ConnectionError):
            client.write(raw[place : place + 1])
            await client.writer.drain()
        await asyncio.sleep(1.0)


async def test_trickling_bodies_do_no_harm_and_return_their_memory(server: Replica) -> None:
    """Each sends a megabyte at once, and then a byte a second."""
    files = open_files(server.process.pid)
    async with beside_a_neighbour(server), AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connect(server.port)) for _ in range(SLOW)]
        head = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (CHAT.encode(), 2 * MEGABYTE)
        trickling = [
            asyncio.create_task(began_and_trickled(client, head + b" " * (MEGABYTE - 1), b" " * 1000))
            for client in clients
        ]
        await asyncio.sleep(4 * PROBE_EVERY_S)
        async with asyncio.timeout(HEAD_LIMIT_S):
            refused = await first_line(clients)
        assert refused == b"429", "together they exceed the limit on bodies in progress"
        for task in trickling:
            task.cancel()
        await asyncio.gather(*trickling, return_exceptions=True)
    await all_gone(server, files)


async def began_and_trickled(client: Any, begun: bytes, raw: bytes) -> None:
    with suppress(ConnectionError):
        client.write(begun)
        await client.writer.drain()
    await trickle(client, raw)


async def first_line(clients: list[Any]) -> bytes:
    """First status received by any of the clients."""
    reading = [asyncio.create_task(client.reader.readline()) for client in clients]
    done, others = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    line: bytes = done.pop().result()
    return line.split()[1]


async def test_a_client_that_never_reads_takes_bounded_memory(both: dict[str, Replica]) -> None:
    """The streams have more than ten megabytes each; the clients read none of it."""
    server = both["router"]
    files = open_files(server.process.pid)
    asked = {"model": MODEL, "prompt": "x", "max_tokens": 8000, "ignore_eos": True, "stream": True, "logprobs": 20}
    async with beside_a_neighbour(server), AsyncExitStack() as stack:
        peak = 0
        for _ in range(SLOW_READERS):
            client = await stack.enter_async_context(connect(server.port, limit=1024))
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            client.write(posted(COMPLETIONS, json.dumps(asked).encode()))
        before = resident_bytes(server.process.pid)

        def left() -> bool:
            nonlocal peak
            peak = max(peak, resident_bytes(server.process.pid) - before)
            return open_files(server.process.pid) < files + 20

        await asyncio.to_thread(wait_until, left, "the router has left them all")
        assert peak < GROWTH
    await asyncio.to_thread(both["replica"].wait_idle)


@pytest.mark.parametrize(
    ("server", "declared"), [("router", True), ("replica", False)], ids=["declared", "chunked"], indirect=["server"]
)
async def test_a_gigabyte_is_refused_and_not_kept(server: Replica, declared: bool) -> None:
    piece = b"x" * MEGABYTE
    framing = f"content-length: {GIGABYTE}" if declared else "transfer-encoding: chunked"
    part = piece if declared else b"%x\r\n%b\r\n" % (len(piece), piece)
    before, sent = memory(server.process.pid), 0
    async with beside_a_neighbour(server), connect(server.port) as client:
        client.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n{framing}\r\n\r\n".encode())
        answering = asyncio.create_task(client.answer())
        with suppress(ConnectionError):
            while sent < GIGABYTE and not answering.done():
                client.write(part)
                await client.writer.drain()
                sent += MEGABYTE
        with suppress(ConnectionError):  # reset, as the rest of the body came to a closed connection
            told = await answering
            assert (told.status, told.error["code"]) == (413, "body_too_large")
    assert sent < GIGABYTE, "the error came before the body was complete"
    assert memory(server.process.pid) - before < GROWTH + 32 * MEGABYTE
