"""Connections in memory: what TCP promises holds for every seed, and what it does not promise varies."""

import asyncio
import errno
import random
from collections.abc import Coroutine
from contextlib import suppress
from contextvars import copy_context
from typing import Any

import pytest

from tests.world.loop import WorldLoop, run
from tests.world.network import HERE, Host, Network

PORT = 80
LONG = random.Random(0).randbytes(700_000)


class Pair:
    """Two hosts; `serve` is what one does with each connection, and `ask` runs at the other."""

    def __init__(self, seed: int) -> None:
        self.loop = WorldLoop(random.Random(seed))
        self.network = Network(self.loop, str(seed))
        self.server, self.client = self.network.host("server"), self.network.host("client")
        self.tasks: list[asyncio.Task[None]] = []

    def run(self, serve: Any, ask: Any) -> Any:
        async def main() -> Any:
            listening = await asyncio.start_server(serve, self.server.address, PORT)
            try:
                return await self.at(self.client, ask(self))
            finally:
                listening.close()

        return run(main(), self.loop)

    def at(self, host: Host, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        context = copy_context()
        context.run(HERE.set, host)
        return self.loop.create_task(work, context=context)

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.server.address, PORT)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(50_000):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    writer.close()


@pytest.mark.parametrize("seed", range(20))
def test_bytes_arrive_whole_and_in_order(seed: int) -> None:
    async def ask(pair: Pair) -> None:
        reader, writer = await pair.open()
        writer.write(LONG)
        writer.write_eof()
        assert await reader.read() == LONG
        writer.close()
        await writer.wait_closed()

    Pair(seed).run(echo, ask)


def test_bytes_of_different_connections_overtake_each_other() -> None:
    async def ask(pair: Pair) -> list[int]:
        came: list[int] = []

        async def one(number: int) -> None:
            reader, writer = await pair.open()
            writer.write(b"x")
            await reader.readexactly(1)
            came.append(number)
            writer.close()

        await asyncio.gather(*map(one, range(5)))
        return came

    orders = [tuple(Pair(seed).run(echo, ask)) for seed in range(8)]
    assert len(set(orders)) > 4
    assert orders == [tuple(Pair(seed).run(echo, ask)) for seed in range(8)]


@pytest.mark.parametrize("seed", range(5))
def test_a_writer_waits_for_a_reader_that_does_not_read(seed: int) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(10.0)
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert await reader.read() == LONG
        writer.close()

    async def ask(pair: Pair) -> None:
        reader, writer = await pair.open()
        began_s = pair.loop.time()
        writer.write(LONG)
        await writer.drain()
        assert pair.loop.time() - began_s > 9.0
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()

    Pair(seed).run(serve, ask)


def test_nobody_listens() -> None:
    async def ask(pair: Pair) -> None:
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(pair.server.address, PORT + 1)
        with pytest.raises(OSError, match="no route"):
            await asyncio.open_connection("10.9.9.9", PORT)

    Pair(1).run(echo, ask)


@pytest.mark.parametrize("seed", range(5))
def test_a_silent_host_keeps_its_connections_and_loses_no_byte(seed: int) -> None:
    async def ask(pair: Pair) -> None:
        reader, writer = await pair.open()
        pair.server.silence()
        writer.write(LONG)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 5.0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pair.open(), 5.0)
        pair.server.speak()
        assert await reader.readexactly(len(LONG)) == LONG
        writer.close()

    Pair(seed).run(echo, ask)


@pytest.mark.parametrize("seed", range(10))
def test_a_killed_process_ends_its_connections(seed: int) -> None:
    async def ask(pair: Pair) -> None:
        reader, writer = await pair.open()
        writer.write(b"x")
        await reader.readexactly(1)
        pair.server.kill()
        with suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), 5.0) == b""
        with pytest.raises(ConnectionRefusedError):
            await pair.open()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(1))

    Pair(seed).run(serve, ask)


@pytest.mark.parametrize("seed", range(5))
def test_a_connection_that_is_cut_is_reset_at_both_ends(seed: int) -> None:
    ends: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with pytest.raises(ConnectionResetError):
            await reader.read()
        ends.append("server")
        writer.close()

    async def ask(pair: Pair) -> None:
        reader, writer = await pair.open()
        chance = random.Random(seed)
        while not pair.server.cut(chance):
            continue  # it has spared the only one
        with pytest.raises(ConnectionResetError):
            await reader.read()
        await asyncio.sleep(1.0)
        ends.append("client")
        writer.close()

    Pair(seed).run(serve, ask)
    assert ends == ["server", "client"]


@pytest.mark.parametrize("seed", range(5))
def test_whoever_has_no_way_any_more_is_told_at_one_end_only(seed: int) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await reader.read()
        writer.transport.abort()

    async def ask(pair: Pair) -> None:
        reader, writer = await pair.open()
        chance = random.Random(seed)
        while not pair.server.cut(chance, OSError(errno.EHOSTUNREACH, "no route")):
            continue  # it has spared the only one
        with pytest.raises(OSError, match="no route"):
            await reader.read()
        await asyncio.sleep(10.0)
        writer.close()

    Pair(seed).run(serve, ask)


@pytest.mark.parametrize("seed", range(5))
def test_lost_packets_are_sent_again_in_order(seed: int) -> None:
    async def ask(pair: Pair) -> None:
        reader, writer = await pair.open()
        began_s = pair.loop.time()
        writer.write(b"first ")
        pair.client.lose_packets(0.5)
        writer.write(b"second")
        assert await reader.readexactly(12) == b"first second"
        assert 0.5 <= pair.loop.time() - began_s < 0.6
        writer.close()

    Pair(seed).run(echo, ask)


def test_hosts_that_are_apart_hear_each_other_once_they_meet() -> None:
    async def ask(pair: Pair) -> float:
        reader, writer = await pair.open()
        pair.server.part(pair.client)
        writer.write(b"hello")
        pair.loop.call_later(5.0, pair.client.meet, pair.server)
        assert await reader.readexactly(5) == b"hello"
        writer.close()
        return pair.loop.elapsed_s

    assert 5.0 < Pair(1).run(echo, ask) < 6.0


def test_nothing_of_a_killed_process_runs_any_more() -> None:
    ran: list[str] = []

    async def main(pair: Pair) -> None:
        async def work() -> None:
            pair.loop.call_later(1.0, ran.append, "a timer")
            try:
                await asyncio.sleep(1.0)
            finally:
                ran.append("its end")

        working = pair.at(pair.server, work())
        await asyncio.sleep(0.5)
        pair.server.kill()
        await asyncio.sleep(5.0)
        assert not ran and not working.done()

    pair = Pair(1)
    run(main(pair), pair.loop)


def test_a_connection_that_nobody_closes_is_found() -> None:
    pair = Pair(1)

    async def main() -> None:
        listening = await pair.loop.create_server(asyncio.Protocol, pair.server.address, PORT)
        await pair.at(pair.client, pair.loop.create_connection(asyncio.Protocol, pair.server.address, PORT))
        listening.close()

    with pytest.raises(AssertionError, match="the connection client 10"):
        run(main(), pair.loop)
