"""A whole router between real sockets, with scripted replicas and hand-written clients."""

import asyncio
import atexit
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

from api.native import FRAMES_TYPE, Native, encode_frame, unwrap
from router.config import RouterConfig
from router.members.spec import ReplicaSpec
from router.process.front import Front
from tests.replica import serving
from tests.router.loopback import until
from tests.world.loop import WorldLoop

MODEL = "m"
DEADLINE_S = 50.0  # none of what is awaited takes this long, whatever else the machine does
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SSE = "text/event-stream; charset=utf-8"
QUEUE_FULL = b'{"error":{"code":"queue_full"}}'
DRAINING = b'{"error":{"code":"draining"}}'
Answer = serving.Answer


class Call:
    """A request as a replica got it, and its answer, to be written piece by piece."""

    def __init__(self, head: bytes, body: bytes, connection: "ReplicaConnection") -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        self.method, self.target, _ = first.split(" ")
        self.path = self.target.partition("?")[0]
        self.head = head
        self.headers = [(name, value) for name, _, value in (line.partition(": ") for line in lines if line)]
        self.body = body
        self.connection = connection

    def header(self, wanted: str) -> str | None:
        values = [value for name, value in self.headers if name == wanted]
        assert len(values) < 2, values
        return values[0] if values else None

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def native(self) -> tuple[Native, Any]:
        native, body = unwrap(self.body)
        return native, json.loads(body)

    def write(self, raw: bytes) -> None:
        self.connection.writer.write(raw)

    def answer(self, body: bytes = b"{}", status: int = 200, **headers: str) -> None:
        self.write(head_of(status, {"content_type": "application/json", **headers}, len(body)) + body)

    def begin(self, content_type: str = SSE, **headers: str) -> None:
        self.write(head_of(200, {"content_type": content_type, **headers}, None))

    def begin_frames(self, content_type: str = SSE, **headers: str) -> None:
        self.begin(FRAMES_TYPE, x_warmroute_content_type=content_type, **headers)

    def chunk(self, body: bytes) -> None:
        self.write(b"%x\r\n%b\r\n" % (len(body), body))

    def frame(self, payload: bytes, *token_ids: int, choice: int = 0) -> None:
        self.chunk(encode_frame(choice, token_ids, payload))

    def end(self) -> None:
        self.write(b"0\r\n\r\n")

    def drop(self) -> None:
        """Close the connection as a dying process does: written data arrives, then nothing more."""
        self.connection.writer.close()

    def reset(self) -> None:
        self.connection.writer.transport.abort()

    async def left(self) -> None:
        """Wait until the router has closed the connection."""
        await self.connection.closed.wait()


Handler = Callable[[Call], Awaitable[None] | None]


def head_of(status: int, headers: dict[str, str], length: int | None) -> bytes:
    framing = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([f"HTTP/1.1 {status} -", *lines, framing, "", ""]).encode()


class ReplicaConnection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.closed = asyncio.Event()

    async def next_call(self) -> Call:
        head = await self.reader.readuntil(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
        return Call(head, await self.reader.readexactly(length), self)


class Scripted:
    """A replica; `handler` gets every request but the router's own."""

    def __init__(self, name: str, handler: Handler, *, native: bool = False, models: Sequence[Any] = (MODEL,)) -> None:
        self.name = name
        self.handler = handler
        self.native = native
        self.calls: list[Call] = []
        self.connections: set[ReplicaConnection] = set()
        self.port = 0
        loaded = {"model": models[0], "block_size": 16, "max_model_len": 4096, "tokenizer": "bytes", "incarnation": 1}
        listed = [model if isinstance(model, dict) else {"id": model} for model in models]
        self.control: dict[str, tuple[int, Any]] = {  # its answers to the router's own requests
            "/load": (200, loaded) if native else (404, {}),
            "/v1/models": (200, {"data": listed}),
            "/health": (200, {}),
            "/ready": (200, {}),
        }
        self.asked: list[str] = []  # the router's own requests
        self.renders = False  # the handler has routes that render

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = ReplicaConnection(reader, writer)
        self.connections.add(connection)
        try:
            while True:
                await self._serve(await connection.next_call())
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            connection.closed.set()
            self.connections.discard(connection)
            writer.transport.abort()

    async def _serve(self, call: Call) -> None:
        tells_tokens = call.path == "/tokenize" or (call.path.endswith("/render") and not self.renders)
        if call.header("x-request-id") is None and (call.path in self.control or tells_tokens):
            self.asked.append(call.path)
            status, answer = self.control.get(call.path, (404, {}))
            call.answer(answer if isinstance(answer, bytes) else json.dumps(answer).encode(), status)
            return
        self.calls.append(call)
        handling = self.handler(call)
        if handling is None:
            await call.connection.writer.drain()
            return
        watched = asyncio.ensure_future(handling)
        leaving = asyncio.ensure_future(self._until_left(call.connection))
        await asyncio.wait({watched, leaving}, return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if not watched.done():  # the router has left; let the handler end
            call.connection.closed.set()
            with suppress(TimeoutError):
                await asyncio.wait_for(watched, 1.0)
        await watched

    @staticmethod
    async def _until_left(connection: ReplicaConnection) -> None:
        # Check without reading: the next request may follow on the same connection.
        while not connection.reader.at_eof() and not connection.writer.is_closing():
            if connection.reader.exception() is not None:
                return
            await asyncio.sleep(0.002)

    @asynccontextmanager
    async def running(self, port: int = 0) -> AsyncIterator["Scripted"]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", port)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for connection in list(self.connections):
                connection.writer.transport.abort()
            await until(lambda: not self.connections, "its connections are closed")

    @property
    def engine(self) -> str:
        return "warmroute" if self.native else "openai"

    @property
    def spec(self) -> ReplicaSpec:
        return ReplicaSpec(name=self.name, url=f"http://127.0.0.1:{self.port}", engine=self.engine)


class Client:
    """A client of one connection, with hand-written HTTP/1.1."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def write(self, raw: bytes) -> None:
        self.writer.write(raw)

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> None:
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        named = {"host": "router", **{name.replace("_", "-"): value for name, value in headers.items()}}
        if body is not None:
            named.setdefault("content-length", str(len(raw)))
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in named.items()), "", ""]
        self.write("\r\n".join(lines).encode() + raw)

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        self.send(method, path, body, **headers)
        return await self.answer(bodiless=method == "HEAD")

    async def post(self, path: str, body: Any = None, **headers: str) -> Answer:
        return await self.ask("POST", path, body, **headers)

    async def get(self, path: str, **headers: str) -> Answer:
        return await self.ask("GET", path, **headers)

    async def head(self) -> tuple[int, dict[str, str]]:
        async with asyncio.timeout(DEADLINE_S):
            first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pairs = [(name, value) for name, _, value in (line.partition(": ") for line in lines if line)]
        names = [name for name, _ in pairs if name != "set-cookie"]
        assert len(set(names)) == len(names), f"twice: {names}"
        return int(first.split()[1]), dict(pairs)

    async def answer(self, *, bodiless: bool = False) -> Answer:
        status, headers = await self.head()
        if bodiless or status in (204, 304):
            return Answer(status, headers, b"")
        async with asyncio.timeout(DEADLINE_S):
            if "content-length" in headers:
                return Answer(status, headers, await self.reader.readexactly(int(headers["content-length"])))
            if headers.get("transfer-encoding") != "chunked":
                return Answer(status, headers, await self.reader.read())
            return Answer(status, headers, b"".join([part async for part in self.chunks()]))

    async def chunks(self) -> AsyncIterator[bytes]:
        while part := await self.chunk():
            yield part

    async def chunk(self) -> bytes:
        async with asyncio.timeout(DEADLINE_S):
            length = int(await self.reader.readuntil(b"\r\n"), 16)
            return (await self.reader.readexactly(length + 2))[:-2]

    async def rest(self) -> bytes:
        """Read until the router closes the connection."""
        async with asyncio.timeout(DEADLINE_S):
            return await self.reader.read()

    def leave(self) -> None:
        self.writer.transport.abort()


@asynccontextmanager
async def connect(port: int, limit: int = 2**16) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=limit)
    try:
        yield Client(reader, writer)
    finally:
        writer.transport.abort()


class Served:
    """A router at work."""

    def __init__(self, front: Front, port: int, replicas: dict[str, Scripted]) -> None:
        self.front = front
        self.port = port
        self.replicas = replicas

    @property
    def router(self) -> Any:
        return self.front.router

    def member(self, name: str) -> Any:
        return self.router.members.by_name[name]

    async def opened(self, count: int) -> None:
        await until(lambda: self.router.lifecycle.open_requests == count, "so many requests have come")

    async def idle(self) -> None:
        """Until nothing is left of any request."""
        await until(lambda: self.router.lifecycle.open_requests == 0, "no request is open")
        assert not self.router.attempts
        assert not self.router.waiting
        for member in self.router.members:
            assert member.candidate.in_flight == 0, member.name
            member.load.check()
        self.router.admission.check()
        assert all(used == 0 for used in self.router.admission.in_flight().values())


@asynccontextmanager
async def served(*replicas: Scripted, ready: bool = True, **config: Any) -> AsyncIterator[Served]:
    """A router in front of these replicas, a worker at `place`; at its end nothing may be left of any request."""
    async with AsyncExitStack() as stack:
        for replica in replicas:
            if not replica.port:
                await stack.enter_async_context(replica.running())
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        usual = {"health_interval_s": 30.0, "policy": "round-robin", "slow_start_s": 0.0}
        specs = tuple(replica.spec for replica in replicas)
        loop = asyncio.get_running_loop()
        given: dict[str, Any] = {"clock": loop.time} if isinstance(loop, WorldLoop) else {}
        place = config.pop("place", None)
        front = Front(RouterConfig(**{**usual, "replicas": specs, **config}), listener, place, **given)
        await front.start()
        try:
            names = {replica.name: replica for replica in replicas}
            running = Served(front, listener.getsockname()[1], names)
            if ready:
                await until(lambda: up(front, names), "every replica takes requests")
                for member in front.router.members:
                    member.upstream.drop_idle()  # used once already, and so tried twice
            yield running
            await running.idle()
        finally:
            await close_at_once(front)


async def close_at_once(front: Front) -> None:
    """Close without waiting for clients."""
    for connection in front.server.connections.open:
        connection.transport.abort()
    await front.close()


def up(front: Front, names: dict[str, Scripted]) -> bool:
    members = front.router.members.by_name
    return all(name in members and members[name].candidate.unavailable is None for name in names)


def refused_port() -> int:
    """A port that refuses connections until a test listens there, and that no other program is given meanwhile."""
    taken = socket.socket()
    atexit.register(taken.close)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    taken.bind(("127.0.0.1", 0))
    port: int = taken.getsockname()[1]
    return port


# ---- requests of clients, and answers of replicas


def chat(text: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


def event(text: str) -> bytes:
    return b"data: %b\n\n" % text.encode()


DONE = event("[DONE]")


def says(body: bytes = b"{}", status: int = 200, **headers: str) -> Handler:
    return lambda call: call.answer(body, status, **headers)


def named(name: str) -> Scripted:
    """Answers with its name."""
    return Scripted(name, says(json.dumps(name).encode()))


def drops(call: Call) -> None:
    """Lost before its first byte."""
    call.drop()


async def silent(call: Call) -> None:
    """Takes the request, and answers nothing until the router leaves."""
    await call.left()


class Script:
    """Handlers of the replicas' requests, in order, whichever replica gets them; the last one repeats."""

    def __init__(self, *handlers: Handler) -> None:
        self._handlers = list(handlers)
        self.calls: list[Call] = []

    def __call__(self, call: Call) -> Awaitable[None] | None:
        self.calls.append(call)
        handler = self._handlers.pop(0) if len(self._handlers) > 1 else self._handlers[0]
        return handler(call)

    def replicas(self, count: int, *, native: bool = False) -> list[Scripted]:
        return [Scripted(f"r{number}", self, native=native) for number in range(count)]


def events_of(stream: bytes) -> list[Any]:
    """The events of a stream; its last one is [DONE]."""
    assert stream.endswith(DONE), stream[-200:]
    lines = [line.removeprefix("data: ") for line in stream.decode().split("\n\n") if line]
    return [json.loads(line) for line in lines[:-1]]
