"""Limits of a client's bytes, times and connections, spoken to byte by byte."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
from starlette.types import Receive, Scope, Send

from api.http.connection import Limits
from api.http.exchange import AsgiConnection
from api.http.server import HttpServer, http_server, listen
from tests.events.processes import DEADLINE_S

HEALTH = b"GET /health HTTP/1.1\r\nHost: test\r\n\r\n"
HALF = b"POST /body HTTP/1.1\r\nHost: test\r\nContent-Length: 10\r\n\r\n12345"
SHORT = Limits(head_s=0.1, body_s=0.1)


class App:
    """Answers at once, or with the body's length, or never, and keeps track of open requests."""

    def __init__(self) -> None:
        self.answered = 0
        self.left = 0
        self.go_on = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        text = b"ok"
        if scope["path"] == "/body":
            length = await self.body(receive)
            if length is None:
                return
            text = b"%d" % length
        headers = [(b"content-length", b"%d" % len(text))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if scope["path"] == "/stream":
            await self.go_on.wait()
        await send({"type": "http.response.body", "body": text})
        self.answered += 1

    async def body(self, receive: Receive) -> int | None:
        length = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left += 1
                return None
            length += len(message["body"])
            if not message.get("more_body"):
                return length


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def rest(self) -> bytes:
        async with asyncio.timeout(DEADLINE_S):
            return await self.reader.read()

    async def until(self, end: bytes) -> bytes:
        async with asyncio.timeout(DEADLINE_S):
            return await self.reader.readuntil(end)


class Served:
    def __init__(self, app: App, port: int) -> None:
        self.app = app
        self._port = port
        self._clients: list[Client] = []

    async def connect(self) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self._port))
        self._clients.append(client)
        return client

    async def close(self) -> None:
        for client in self._clients:
            client.writer.close()
            with contextlib.suppress(ConnectionError):
                await client.writer.wait_closed()


@asynccontextmanager
async def serving(limits: Limits = Limits()) -> AsyncIterator[Served]:  # noqa: B008 - frozen
    app = App()
    server = http_server(app, limits)
    with listen("127.0.0.1", 0) as listener:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        await server.listening.wait()
        served = Served(app, listener.getsockname()[1])
        try:
            yield served
        finally:
            app.go_on.set()
            server.end()
            await task
            await served.close()


def code(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    return int(head.split()[1]), json.loads(body)["error"]["code"]


ENDLESS = {
    "a value": [b"GET / HTTP/1.1\r\nHost: t\r\nX: ", b"a" * 4000],
    "a name": [b"GET / HTTP/1.1\r\n", b"a" * 4000],
    "headers": [b"GET / HTTP/1.1\r\n", b"x: y\r\n" * 700],
    "a path": [b"GET /", b"a" * 4000],
    "trailers": [b"POST /body HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"x: y\r\n" * 700],
    "a trailer": [b"POST /body HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: ", b"a" * 4000],
}


@pytest.mark.parametrize("what", ENDLESS)
async def test_headers_without_end_are_refused(what: str) -> None:
    begin, more = ENDLESS[what]
    async with serving() as served:
        client = await served.connect()
        await client.say(begin)
        for _ in range(100):  # 400,000 bytes; all at once could be one read, whose parts the parser does not tell
            await client.say(more)
            await asyncio.sleep(0)
        assert code(await client.rest()) == (431, "headers_too_large")
        assert served.app.answered == 0


async def test_headers_within_the_limit_and_a_large_body_are_taken() -> None:
    async with serving() as served:
        client = await served.connect()
        head = b"POST /body HTTP/1.1\r\nHost: t\r\nX: " + b"a" * 60_000 + b"\r\nContent-Length: 1000000\r\n\r\n"
        await client.say(head + b"b" * 1_000_000)
        assert (await client.until(b"1000000")).startswith(b"HTTP/1.1 200")
        chunk = b"1\r\na\r\n"
        await client.say(
            b"POST /body HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk * 50_000 + b"0\r\n\r\n"
        )
        assert (await client.until(b"\r\n\r\n50000")).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("sent", [b"GET /hea", HALF, b"\r\n", HEALTH + b"GET"])
async def test_a_request_that_does_not_continue_is_ended(sent: bytes) -> None:
    async with serving(SHORT) as served:
        client = await served.connect()
        await client.say(sent)
        if sent.startswith(HEALTH):
            await client.until(b"\r\n\r\nok")
        assert code(await client.rest()) == (408, "request_timeout")
        assert served.app.left == (sent == HALF)


async def test_a_silent_connection_is_closed_without_a_word() -> None:
    async with serving(SHORT) as served:
        assert await (await served.connect()).rest() == b""


async def test_idle_connections_and_long_answers_are_left_alone() -> None:
    async with serving(SHORT) as served:
        idle, streamed, cut = [await served.connect() for _ in range(3)]
        await idle.say(HEALTH)
        await idle.until(b"ok")
        await streamed.say(b"GET /stream HTTP/1.1\r\nHost: t\r\n\r\n" + HALF)  # half a request that waits for its turn
        await streamed.until(b"\r\n\r\n")
        for _ in range(2):  # two looks at the time later
            await cut.say(HALF)
            await cut.rest()
            cut = await served.connect()
        await idle.say(HEALTH)
        assert (await idle.until(b"\r\n\r\nok")).startswith(b"HTTP/1.1 200")
        served.app.go_on.set()
        assert await streamed.until(b"ok") == b"ok"
        await streamed.say(b"67890")
        assert (await streamed.until(b"\r\n\r\n10")).startswith(b"HTTP/1.1 200")


async def test_pipelined_requests_are_answered_up_to_a_number_and_then_the_connection_is_closed() -> None:
    async with serving() as served:
        client = await served.connect()
        await client.say(HEALTH * 20)
        answers = await client.rest()
        assert answers.count(b"HTTP/1.1 200") == served.app.answered == 16
        assert answers.count(b"connection: close") == 1


async def test_beyond_the_connections_that_are_taken_only_probes_are_answered() -> None:
    async with serving(Limits(connections=2, spare_connections=1)) as served:
        kept = [await served.connect() for _ in range(2)]
        for client in kept:
            await client.say(HEALTH)
            await client.until(b"ok")
        spare = await served.connect()
        await spare.say(HEALTH)
        answer = await spare.rest()
        assert answer.startswith(b"HTTP/1.1 200") and b"connection: close" in answer
        spare = await served.connect()
        await spare.say(b"GET / HTTP/1.1\r\nHost: t\r\n\r\n")
        assert code(await spare.rest()) == (503, "too_many_connections")
        silent = await served.connect()
        assert await (await served.connect()).rest() == b""
        assert not silent.reader.at_eof()
        assert await silent.rest() == b""
        await kept[0].say(HEALTH)
        assert (await kept[0].until(b"ok")).startswith(b"HTTP/1.1 200")


async def test_what_is_no_http_is_refused_in_the_shape_of_every_error() -> None:
    async with serving() as served:
        client = await served.connect()
        await client.say(b"\x16\x03\x01\x02\r\n\r\n")
        answer = await client.rest()
        assert answer.startswith(b"HTTP/1.1 400")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "garbage", [b"\x16\x03\x01\x02\r\n\r\n", b"POST /body HTTP/1.1\r\nHost: t\r\nContent-Length: x\r\n\r\n"]
)
async def test_garbage_behind_a_request_does_not_cut_its_answer(garbage: bytes) -> None:
    async with serving() as served:
        waiting, streamed, other = [await served.connect() for _ in range(3)]
        await waiting.say(HALF + b"67890" + garbage)
        answer = await waiting.rest()
        assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"\r\n\r\n10")
        assert answer.count(b"HTTP/1.1") == 1
        await streamed.say(b"GET /stream HTTP/1.1\r\nHost: t\r\n\r\n")
        await streamed.until(b"\r\n\r\n")
        await streamed.say(garbage * 100)
        await other.say(HEALTH)
        await other.until(b"ok")  # so it has read the garbage, too
        served.app.go_on.set()
        assert await streamed.rest() == b"ok"


@pytest.mark.parametrize("coding", [b"gzip, chunked", b"gzip\r\nTransfer-Encoding: chunked"])
async def test_an_unknown_transfer_coding_is_refused(coding: bytes) -> None:
    async with serving() as served:
        client = await served.connect()
        await client.say(
            b"POST /body HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: " + coding + b"\r\n\r\n2\r\nab\r\n0\r\n\r\n"
        )
        assert code(await client.rest()) == (501, "transfer_encoding_unknown")


class Broken(AsgiConnection):
    def _scope(self, *_: object) -> Scope:
        raise KeyError("a mistake of ours")


async def test_a_mistake_of_ours_is_logged_and_not_blamed_on_the_client(caplog: pytest.LogCaptureFixture) -> None:
    server = HttpServer(partial(Broken, limits=Limits(), app=App()))
    with listen("127.0.0.1", 0) as listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await server.listening.wait()
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(HEALTH)
        async with asyncio.timeout(DEADLINE_S):
            answer = await reader.read()
        writer.close()
        server.end()
        await serving
    assert answer.startswith(b"HTTP/1.1 500") and "a mistake of ours" in caplog.text


async def test_an_end_cuts_requests_that_are_half_sent_and_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with serving() as served:
            half, pipelined = await served.connect(), await served.connect()
            await half.say(HALF)
            await pipelined.say(b"GET /stream HTTP/1.1\r\nHost: t\r\n\r\n" + HALF)
            await pipelined.until(b"\r\n\r\n")
        assert await half.rest() == b""
        assert await pipelined.rest() == b"ok"
    assert caplog.text == ""
    assert served.app.left >= 1  # 2 where the stream ended before the server


async def test_a_client_of_http_1_0_is_asked_for_nothing() -> None:
    """It would take 100 for the status of its answer."""
    async with serving() as served:
        client = await served.connect()
        await client.say(b"POST /body HTTP/1.0\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n")
        await client.say(b"abc")
        assert (await client.rest()).startswith(b"HTTP/1.1 200 ")
