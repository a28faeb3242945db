"""The front between real sockets: small servers stand for the replicas, and clients speak bytes."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from api.errors import draining
from router.front_server import FrontServer
from router.round_robin import Replica, RoundRobin, end_to_end

DEADLINE_S = 10.0


class Server(FrontServer):
    """Any app, on a free port of loopback."""

    def __init__(self, app: ASGIApp, head_timeout_s: float) -> None:
        super().__init__(app, drain_timeout_s=1, head_timeout_s=head_timeout_s)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.socket.getsockname()[1]


@asynccontextmanager
async def serving(app: ASGIApp, head_timeout_s: float = DEADLINE_S) -> AsyncIterator[Server]:
    server = Server(app, head_timeout_s)
    task = asyncio.create_task(server.serve([server.socket]))
    await until(lambda: server.started)
    try:
        yield server
    finally:
        server.should_exit = True
        await task


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def fleet(*apps: ASGIApp) -> AsyncIterator[tuple[RoundRobin, int]]:
    """A front with these apps behind it, and the front's port."""
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(serving(app)) for app in apps]
        front = RoundRobin(Replica(f"r{n}", "127.0.0.1", server.port) for n, server in enumerate(servers))
        server = await stack.enter_async_context(serving(front))
        yield front, server.port


def refused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port


async def body_of(receive: Receive) -> bytes:
    parts, more = [], True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


async def respond(send: Send, body: bytes, status: int = 200, *headers: tuple[bytes, bytes]) -> None:
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [length, *headers]})
    await send({"type": "http.response.body", "body": body})


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with what arrived."""
    seen = {
        "method": scope["method"],
        "target": (scope["raw_path"] + b"?" + scope["query_string"]).decode(),
        "headers": [[name.decode(), value.decode()] for name, value in scope["headers"]],
        "body": (await body_of(receive)).decode(),
    }
    await respond(
        send, json.dumps(seen).encode(), 418, (b"x-own", b"yes"), (b"connection", b"x-own2"), (b"x-own2", b"n")
    )


def named(name: str) -> ASGIApp:
    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await respond(send, name.encode())

    return app


class Client:
    """One connection, and HTTP by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, head: str, body: bytes = b"") -> tuple[int, dict[str, str], bytes]:
        self.send(head, body)
        return await self.answer(head)

    def send(self, head: str, body: bytes = b"") -> None:
        length = f"content-length: {len(body)}\r\n" if body else ""
        self.writer.write(
            head.replace("\n", "\r\n").encode() + b"\r\nhost: front\r\n" + length.encode() + b"\r\n" + body
        )

    async def answer(self, head: str = "") -> tuple[int, dict[str, str], bytes]:
        status, headers = await self.head()
        if head.startswith("HEAD"):
            return status, headers, b""
        if "content-length" in headers:
            return status, headers, await self.reader.readexactly(int(headers["content-length"]))
        parts = []
        while part := await self.chunk():
            parts.append(part)
        return status, headers, b"".join(parts)

    async def head(self) -> tuple[int, dict[str, str]]:
        async with asyncio.timeout(DEADLINE_S):
            first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        return int(first.split()[1]), dict(line.lower().split(": ", 1) for line in lines if line)

    async def chunk(self) -> bytes:
        async with asyncio.timeout(DEADLINE_S):
            length = int(await self.reader.readuntil(b"\r\n"), 16)
            return (await self.reader.readexactly(length + 2))[:-2]


@asynccontextmanager
async def client_of(port: int) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Client(reader, writer)
    finally:
        writer.transport.abort()


async def test_requests_of_one_connection_take_turns() -> None:
    async with fleet(named("a"), named("b"), named("c")) as (_, port), client_of(port) as client:
        answers = [await client.ask("GET / HTTP/1.1") for _ in range(7)]
    assert [body for _, _, body in answers] == [b"a", b"b", b"c", b"a", b"b", b"c", b"a"]
    assert [headers["x-warmroute-replica"] for _, headers, _ in answers[:3]] == ["r0", "r1", "r2"]


async def test_request_and_answer_pass_untouched_but_for_the_headers_of_a_connection() -> None:
    async with fleet(echo) as (_, port), client_of(port) as client:
        head = (
            "POST /v1/a%20b?c=%26d HTTP/1.1\nX-Mine: kept\nTE: trailers\nConnection: keep-alive, x-secret\nX-Secret: 1"
        )
        status, headers, body = await client.ask(head, b'{"a": 1}')
    seen = json.loads(body)
    assert (status, headers["x-own"]) == (418, "yes")
    assert "x-own2" not in headers
    assert (seen["method"], seen["target"], seen["body"]) == ("POST", "/v1/a%20b?c=%26d", '{"a": 1}')
    sent = dict(seen["headers"])
    assert sent == {"x-mine": "kept", "host": "front", "content-length": "8", "connection": "close"}


async def test_a_request_in_chunks_arrives_whole() -> None:
    async with fleet(echo) as (_, port), client_of(port) as client:
        client.writer.write(
            b"POST / HTTP/1.1\r\nhost: f\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
        )
        _, _, body = await client.answer()
    assert json.loads(body)["body"] == "abcde"


async def test_a_client_cannot_have_the_length_dropped() -> None:
    kept = end_to_end([(b"connection", b"content-length, host, x-a"), (b"content-length", b"3"), (b"x-a", b"1")])
    assert kept == [(b"content-length", b"3")]


async def test_a_large_body_passes_in_both_directions() -> None:
    async def back(_scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send, await body_of(receive))

    payload = bytes(range(256)) * 40_000  # 10 MB: more than all buffers on the way
    async with fleet(back) as (_, port), client_of(port) as client:
        _, _, body = await client.ask("POST / HTTP/1.1", payload)
    assert body == payload


async def test_each_part_of_a_stream_arrives_before_the_next_is_made() -> None:
    arrived = asyncio.Event()

    async def stream(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for n in range(20):
            await send({"type": "http.response.body", "body": b"data: %d\n\n" % n, "more_body": True})
            await arrived.wait()
            arrived.clear()
        await send({"type": "http.response.body", "body": b""})

    async with fleet(stream) as (_, port), client_of(port) as client:
        client.send("GET / HTTP/1.1")
        _, headers = await client.head()
        assert headers["content-type"] == "text/event-stream"
        for n in range(20):
            assert await client.chunk() == b"data: %d\n\n" % n
            arrived.set()
        assert await client.chunk() == b""


async def test_head_has_the_length_and_no_body() -> None:
    async with fleet(named("four")) as (_, port), client_of(port) as client:
        assert (await client.ask("HEAD / HTTP/1.1"))[1]["content-length"] == "4"
        assert (await client.ask("GET / HTTP/1.1"))[2] == b"four"  # the connection is still in step


@pytest.mark.parametrize("when", ["before the answer", "in its midst"])
async def test_a_client_that_leaves_is_noticed_by_the_replica(when: str) -> None:
    asked, gone = asyncio.Event(), asyncio.Event()

    async def patient(_scope: Scope, receive: Receive, send: Send) -> None:
        await body_of(receive)
        if when == "in its midst":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        asked.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        gone.set()

    async with fleet(patient) as (_, port), asyncio.timeout(DEADLINE_S):
        async with client_of(port) as client:
            client.send("POST / HTTP/1.1", b"{}")
            await asked.wait()
        await gone.wait()


async def test_a_client_that_leaves_ends_the_first_of_its_pipelined_requests_too() -> None:
    asked, gone = asyncio.Event(), asyncio.Event()

    async def patient(_scope: Scope, receive: Receive, _send: Send) -> None:
        asked.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        gone.set()

    async with fleet(patient) as (_, port), asyncio.timeout(DEADLINE_S):
        async with client_of(port) as client:
            client.send("GET / HTTP/1.1")
            client.send("GET / HTTP/1.1")
            await asked.wait()
        await gone.wait()


async def test_a_slow_reader_stops_the_replica_instead_of_filling_memory() -> None:
    clock = asyncio.get_running_loop().time
    sent, last_s = 0, clock()

    async def endless(_scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal sent, last_s
        await body_of(receive)
        gone = asyncio.ensure_future(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not gone.done():
            await send({"type": "http.response.body", "body": bytes(100_000), "more_body": True})
            sent, last_s = sent + 100_000, clock()
            await asyncio.sleep(0)

    async with fleet(endless) as (_, port), client_of(port) as client:
        client.send("GET / HTTP/1.1")
        await client.head()
        await until(lambda: clock() - last_s > 0.3)
        assert 0 < sent < 64_000_000


async def test_a_replica_that_refuses_is_passed_over() -> None:
    async with fleet(named("a")) as (front, port), client_of(port) as client:
        front.replicas.insert(0, Replica("dead", "127.0.0.1", refused_port()))
        answers = [await client.ask("POST / HTTP/1.1", b"{}") for _ in range(4)]
    assert [body for _, _, body in answers] == [b"a"] * 4


async def test_without_a_live_replica_the_answer_is_an_error_in_openai_shape() -> None:
    async with fleet() as (front, port), client_of(port) as client:
        assert (await client.ask("GET /health HTTP/1.1"))[0] == 200
        assert (await client.ask("GET /ready HTTP/1.1"))[0] == 503
        front.replicas.append(Replica("dead", "127.0.0.1", refused_port()))
        status, headers, body = await client.ask("POST /v1/completions HTTP/1.1", b"{}")
        assert (status, headers["retry-after"]) == (503, "1")
        assert json.loads(body)["error"]["type"] == "service_unavailable"
        assert (await client.ask("GET /ready HTTP/1.1"))[
            0
        ] == 200  # connecting is the only proof that a replica is dead


@asynccontextmanager
async def raw_replica(answer: bytes) -> AsyncIterator[Replica]:
    """Sends these bytes to whoever asks, and closes without reading a body."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield Replica("raw", "127.0.0.1", server.sockets[0].getsockname()[1])


@pytest.mark.parametrize(
    "answer",
    [b"", b"HTTP/1.1 200 O", b"no HTTP at all\r\n\r\n", b"HTTP/1.1 200 OK\r\n" + b"x-a: %b\r\n" % (b"a" * 1000) * 100],
    ids=["nothing", "half a line", "something else", "endless headers"],
)
async def test_an_answer_that_never_begins_is_a_502(answer: bytes) -> None:
    async with fleet() as (front, port), raw_replica(answer) as raw, client_of(port) as client:
        front.replicas.append(raw)
        status, _, body = await client.ask("GET / HTTP/1.1")
    assert status == 502
    assert "raw ended the connection without an answer" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize("framing", [b"content-length: 9", b"transfer-encoding: chunked"])
async def test_an_answer_that_breaks_off_breaks_off_for_the_client_too(framing: bytes) -> None:
    head = b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n\r\n"
    async with fleet() as (front, port), raw_replica(head + b"3\r\nabc\r\n") as raw, client_of(port) as client:
        front.replicas.append(raw)
        client.send("GET / HTTP/1.1")
        assert (await client.head())[0] == 200
        with pytest.raises(asyncio.IncompleteReadError):
            await client.reader.readuntil(b"0\r\n\r\n")


async def test_a_provisional_answer_is_not_taken_for_the_answer() -> None:
    answer = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    async with fleet() as (front, port), raw_replica(answer) as raw, client_of(port) as client:
        front.replicas.append(raw)
        status, headers, body = await client.ask("GET / HTTP/1.1")
    assert (status, body) == (200, b"ok")
    assert "link" not in headers


async def test_an_early_refusal_reaches_a_client_that_is_still_sending() -> None:
    async def refuse(_scope: Scope, _receive: Receive, send: Send) -> None:
        await respond(send, b"too large", 413)

    async with fleet(refuse) as (_, port), client_of(port) as client:
        client.writer.write(b"POST / HTTP/1.1\r\nhost: f\r\ncontent-length: 1000000\r\n\r\n" + bytes(1000))
        status, _, body = await client.answer()
    assert (status, body) == (413, b"too large")


@pytest.mark.parametrize("connection", ["keep-alive", "close"])
async def test_an_early_refusal_of_megabytes_arrives_though_the_replica_closed(connection: str) -> None:
    refusal = b"HTTP/1.1 413 Content Too Large\r\ncontent-length: 9\r\nconnection: close\r\n\r\ntoo large"
    async with fleet() as (front, port), raw_replica(refusal) as raw:
        front.replicas.append(raw)
        for _ in range(20):
            async with client_of(port) as client:
                head = f"POST / HTTP/1.1\r\nhost: f\r\nconnection: {connection}\r\ncontent-length: 8000000\r\n\r\n"
                client.writer.write(head.encode())
                for _ in range(80):  # as most clients do: the answer is read when all is sent
                    client.writer.write(bytes(100_000))
                    await client.writer.drain()
                status, _, body = await client.answer()
            assert (status, body) == (413, b"too large")


class Draining:
    """Refuses as a draining replica does; `asked` counts how often it had to."""

    def __init__(self) -> None:
        self.asked = 0

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        self.asked += 1
        if self.asked % 2:  # as it comes: before the body, or after it
            await body_of(receive)
        await respond(send, draining().body(), 503, (b"retry-after", b"1"))


async def test_a_draining_replica_leaves_the_request_to_the_next_one_and_its_turn_too() -> None:
    drains = Draining()
    body = bytes(range(97, 123)) * 40_000  # just below what is kept
    async with fleet(drains, echo) as (_, port), client_of(port) as client:
        for _ in range(4):
            status, headers, answer = await client.ask("POST / HTTP/1.1", body)
            assert (status, headers["x-warmroute-replica"]) == (418, "r1")
            assert json.loads(answer)["body"].encode() == body
        assert drains.asked == 1  # then it rested


async def test_a_draining_replica_is_asked_again_after_its_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.round_robin.REST_S", 0.0)
    drains = Draining()
    async with fleet(drains, echo) as (_, port), client_of(port) as client:
        for _ in range(4):
            assert (await client.ask("POST / HTTP/1.1", b"abc"))[0] == 418
    assert drains.asked == 2


async def test_a_body_too_large_to_be_kept_is_refused_once_and_then_goes_elsewhere() -> None:
    drains = Draining()
    async with fleet(drains, echo) as (_, port), client_of(port) as client:
        status, headers, body = await client.ask("POST / HTTP/1.1", b"a" * 2_000_000)
        assert (status, headers["retry-after"]) == (503, "1")
        assert json.loads(body)["error"]["code"] == "draining"
        assert [(await client.ask("POST / HTTP/1.1", b"a" * 2_000_000))[0] for _ in range(3)] == [418] * 3


async def test_where_all_drain_the_client_reads_why() -> None:
    async with fleet(Draining(), Draining()) as (_, port), client_of(port) as client:
        status, _, body = await client.ask("POST / HTTP/1.1", b"{}")
    assert (status, json.loads(body)["error"]["code"]) == (503, "draining")


async def test_another_503_is_passed_on_as_it_is() -> None:
    async def loading(_scope: Scope, _receive: Receive, send: Send) -> None:
        await respond(send, b"loading" * 10_000, 503)

    async with fleet(loading, echo) as (_, port), client_of(port) as client:
        assert (await client.ask("GET / HTTP/1.1"))[::2] == (503, b"loading" * 10_000)


@pytest.mark.parametrize("end", [b"\r\n\r\n", b""], ids=["complete", "endless"])
@pytest.mark.parametrize("line", [b"x-a: %b\r\n" % (b"a" * 1000) * 200, b"x-a: " + b"a" * 200_000])
async def test_headers_without_bound_are_refused_and_the_connection_closed(line: bytes, end: bytes) -> None:
    async with fleet(echo) as (_, port), client_of(port) as client:
        client.writer.write(b"GET / HTTP/1.1\r\nhost: f\r\n" + line + end)
        status, headers, body = await client.answer()
        assert (status, headers["connection"]) == (431, "close")
        assert "longer than 65,536 bytes" in json.loads(body)["error"]["message"]
        async with asyncio.timeout(DEADLINE_S):
            assert await client.reader.read() == b""


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nhost"])
async def test_a_connection_that_asks_for_nothing_is_closed(sent: bytes) -> None:
    async with serving(RoundRobin(), head_timeout_s=0.05) as server, client_of(server.port) as client:
        client.writer.write(sent)
        async with asyncio.timeout(DEADLINE_S):
            assert await client.reader.read() == b""


async def test_a_second_request_that_never_ends_its_headers_is_closed_and_a_slow_answer_is_not() -> None:
    ask = asyncio.Event()

    async def slow(_scope: Scope, _receive: Receive, send: Send) -> None:
        await ask.wait()
        await respond(send, b"late")

    async with serving(slow, head_timeout_s=0.05) as server, client_of(server.port) as client:
        client.send("GET / HTTP/1.1")
        asyncio.get_running_loop().call_later(0.2, ask.set)
        assert (await client.answer())[2] == b"late"
        client.writer.write(b"GET / HT")
        async with asyncio.timeout(DEADLINE_S):
            assert await client.reader.read() == b""


async def test_many_streams_at_once_do_not_mix() -> None:
    async def count(_scope: Scope, receive: Receive, send: Send) -> None:
        name = await body_of(receive)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(10):
            await send({"type": "http.response.body", "body": name, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})

    async def one(port: int, name: bytes) -> bytes:
        async with client_of(port) as client:
            return (await client.ask("POST / HTTP/1.1", name))[2]

    async with fleet(count, count) as (_, port):
        names = [b"<%d>" % n for n in range(100)]
        assert await asyncio.gather(*(one(port, name) for name in names)) == [name * 10 for name in names]
