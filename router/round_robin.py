"""The simplest front: each request goes to the next replica, whatever its cache holds.

It stands where the cache-aware router will stand. Bodies and streams pass through as they come, each request on a
connection of its own, so that a replica's death costs only the requests that it was answering. Of a request
only a small body is kept, and only until its answer is complete: a replica that drains leaves it to the next one.
"""

import asyncio
import json
import logging
import socket
from collections.abc import Iterable
from typing import NamedTuple

import httptools
from starlette.types import Receive, Scope, Send

from api.errors import ApiError

log = logging.getLogger(__name__)

CHUNK_BYTES = 64 * 1024
MAX_HEAD_BYTES = 64 * 1024
MAX_KEPT_BYTES = 1024 * 1024  # of a request's body, to be sent again
MAX_REFUSAL_BYTES = 16 * 1024  # of an answer, to see why it refuses
CONNECT_TIMEOUT_S = 2.0
LINGER_S = 2.0  # for a client that sends on after it was refused
REST_S = 1.0  # of a replica that drains
ANSWERED_BY = b"x-warmroute-replica"
# RFC 9110, 7.6.1: they speak of one connection and end with it. `expect` was answered by our own server.
HOP_BY_HOP = frozenset(
    b"connection expect keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    b"transfer-encoding upgrade".split()
)
FRAMING = {b"content-length", b"host"}  # a client that could have them dropped could smuggle a second request in
Header = tuple[bytes, bytes]


class Replica(NamedTuple):
    name: str
    host: str
    port: int


class BrokenAnswer(Exception):
    """The replica's answer ended before it was complete, or is not HTTP."""


class Draining(Exception):
    """The replica takes no new work, and the client has seen nothing of that yet."""


class RoundRobin:
    """An ASGI app; `replicas` are those that are ready, and may change at any time. `cut` counts unfinished answers."""

    def __init__(self, replicas: Iterable[Replica] = ()) -> None:
        self.replicas = list(replicas)
        self.cut = 0
        self._turn = 0
        self._rests_until_s: dict[str, float] = {}  # by the loop's clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "served without lifespan and websockets"
        if scope["path"] == "/health":
            await _answer(send, 200, b'{"status":"ok"}')
        elif scope["path"] == "/ready" and self.replicas:
            await _answer(send, 200, b'{"status":"ready"}')
        elif scope["path"] == "/ready":
            await _refuse(send, 503, "no replica is ready")
        else:
            try:
                await self._forward(scope, Body(receive), send)
            except asyncio.CancelledError:
                self.cut += 1
                raise

    async def _forward(self, scope: Scope, body: "Body", send: Send) -> None:
        replicas = self._in_turn()
        for number, replica in enumerate(replicas):
            try:
                connection = await Connection.open(replica)
            except OSError as error:
                log.warning("%s takes no connection (%s); the next one is asked", replica.name, error)
                continue
            others = number + 1 < len(replicas)
            exchange = Exchange(replica, scope, body, send, others)
            try:
                await _relay(exchange, connection)
            except Draining:
                log.info("%s drains; the next one is asked", replica.name)
                continue
            finally:
                connection.close()  # the answer is complete, or nobody wants the rest
                if exchange.draining:
                    self._rests_until_s[replica.name] = asyncio.get_running_loop().time() + REST_S
            return
        await _refuse(send, 503, "no replica takes connections")

    def _in_turn(self) -> list[Replica]:
        """All replicas, beginning with the one whose turn it is; those that rest come last."""
        now_s = asyncio.get_running_loop().time()
        self._rests_until_s = {name: end_s for name, end_s in self._rests_until_s.items() if end_s > now_s}
        first = self._turn % max(1, len(self.replicas))
        self._turn = first + 1
        turns = self.replicas[first:] + self.replicas[:first]
        return sorted(turns, key=lambda replica: replica.name in self._rests_until_s)


class Body:
    """A request's body as the client sends it; while it is small it is kept, so that it can be sent again."""

    def __init__(self, receive: Receive) -> None:
        self.kept = bytearray()
        self.repeatable = True
        self.over = asyncio.Event()  # no more of it will come
        self.client_left = False
        self._receive = receive

    async def next(self) -> bytes:
        """The next part; when all have come, waits for the client to leave. Cancelled, it loses nothing."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.client_left = True
            self.over.set()
            return b""
        part: bytes = message.get("body", b"")
        self.repeatable &= len(self.kept) + len(part) <= MAX_KEPT_BYTES
        if self.repeatable:
            self.kept += part
        else:
            self.kept.clear()
        if not message.get("more_body", False):
            self.over.set()
        return part


class Connection:
    """A socket: a transport would forget what it has received once a write fails, and the reason is in there."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def open(cls, replica: Replica) -> "Connection":
        family = socket.AF_INET6 if ":" in replica.host else socket.AF_INET
        connecting = socket.socket(family, socket.SOCK_STREAM)
        try:
            connecting.setblocking(False)
            connecting.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await asyncio.get_running_loop().sock_connect(connecting, (replica.host, replica.port))
        except BaseException:
            connecting.close()
            raise
        return cls(connecting)

    async def send(self, sent: bytes) -> None:
        await self._loop.sock_sendall(self._socket, sent)

    async def receive(self) -> bytes:
        return await self._loop.sock_recv(self._socket, CHUNK_BYTES)

    def close(self) -> None:
        self._socket.close()


class Exchange:
    """One request and the replica that answers it; with `others` it may leave that to another one."""

    def __init__(self, replica: Replica, scope: Scope, body: Body, send: Send, others: bool) -> None:
        self.replica, self.scope, self.body, self.send = replica, scope, body, send
        self.others = others
        self.draining = False


async def _relay(exchange: Exchange, connection: Connection) -> None:
    """Pass the request on and the answer back at the same time, until the answer ends or the client leaves."""
    upload = asyncio.create_task(_upload(exchange, connection))
    download = asyncio.create_task(_download(exchange, connection, upload))
    leaving = asyncio.create_task(_until_client_leaves(exchange.body, upload))
    tasks = (upload, download, leaving)
    try:
        await asyncio.wait({download, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if not task.cancelled():
            task.result()


async def _upload(exchange: Exchange, connection: Connection) -> None:
    """Send the request; it ends early when the replica reads no further, whose answer says why."""
    head, chunked = request_head(exchange.scope)
    body = exchange.body
    begun = bytes(body.kept)
    try:
        await connection.send(head + (_chunk(begun) if chunked and begun else begun))
        while not body.over.is_set():
            if part := await body.next():
                await connection.send(_chunk(part) if chunked else part)
        if chunked and not body.client_left:
            await connection.send(b"0\r\n\r\n")
    except OSError as error:
        log.debug("%s reads no further: %s", exchange.replica.name, error)


def _chunk(part: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(part), part)


async def _until_client_leaves(body: Body, upload: asyncio.Task[None]) -> None:
    """What it still sends when the replica has heard enough leads nowhere."""
    await asyncio.wait({upload})
    while not body.client_left:
        await body.next()


async def _download(exchange: Exchange, connection: Connection, upload: asyncio.Task[None]) -> None:
    """Send the answer to the client as it comes."""
    replica, send = exchange.replica, exchange.send
    answer = Answer(bodiless=exchange.scope["method"] == "HEAD")
    begun = False
    try:
        await _first_of(answer, exchange, connection, upload)
        begun = True
        headers = [*end_to_end(answer.headers), (ANSWERED_BY, replica.name.encode())]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        while True:
            if part := answer.take_body():
                await send({"type": "http.response.body", "body": part, "more_body": True})
            if answer.complete:
                break
            answer.feed(await connection.receive())
        await _linger(exchange.body)
        await send({"type": "http.response.body", "body": b""})
    except (BrokenAnswer, OSError) as error:
        log.warning("%s broke off its answer: %s", replica.name, error)
        if not begun:
            await _refuse(send, 502, f"{replica.name} ended the connection without an answer")
        # An answer that has begun stays incomplete: the server sees that, and closes the client's connection.


async def _first_of(answer: "Answer", exchange: Exchange, connection: Connection, upload: asyncio.Task[None]) -> None:
    """Read the answer's head, and all of it where it may be another replica's turn."""
    while not answer.status:
        answer.feed(await connection.receive())
    if answer.status >= 400:
        upload.cancel()  # it has heard enough
    if answer.status != 503:
        return
    while not answer.complete and answer.body_bytes <= MAX_REFUSAL_BYTES:
        answer.feed(await connection.receive())
    exchange.draining = says_draining(answer.peek_body())
    if exchange.draining and exchange.others and exchange.body.repeatable:
        raise Draining


def says_draining(body: bytes) -> bool:
    try:
        return bool(json.loads(body)["error"]["code"] == "draining")
    except (ValueError, LookupError, TypeError):
        return False


async def _linger(body: Body) -> None:
    """Closed while it sends, a client would not read its answer: what it sends is dropped a little longer."""
    try:
        async with asyncio.timeout(LINGER_S):
            await body.over.wait()
    except TimeoutError:
        return


class Answer:
    """What the replica has answered so far, out of the bytes fed."""

    def __init__(self, *, bodiless: bool) -> None:
        self.status = 0
        self.headers: list[Header] = []
        self.complete = False
        self._bodiless = bodiless
        self._body: list[bytes] = []
        self.body_bytes = 0  # all of it, taken or not
        self._head_bytes = 0
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, received: bytes) -> None:
        if not received:
            raise BrokenAnswer("it closed the connection")
        if not self.status:
            self._head_bytes += len(received)
        try:
            self._parser.feed_data(received)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise BrokenAnswer(f"it does not speak HTTP ({error})") from error
        if not self.status and self._head_bytes > MAX_HEAD_BYTES:
            raise BrokenAnswer(f"its headers are longer than {MAX_HEAD_BYTES:,} bytes")

    def take_body(self) -> bytes:
        body = b"".join(self._body)
        self._body.clear()
        return body

    def peek_body(self) -> bytes:
        return b"".join(self._body)

    # What httptools calls:

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # provisional: the answer proper follows
            self.headers.clear()
        else:
            self.status = status
            self.complete = self._bodiless

    def on_body(self, body: bytes) -> None:
        self._body.append(body)
        self.body_bytes += len(body)

    def on_message_complete(self) -> None:
        self.complete = self.status != 0


def request_head(scope: Scope) -> tuple[bytes, bool]:
    """The request line and headers for the replica, and whether the body has to be sent in chunks."""
    headers = end_to_end(scope["headers"])
    chunked = any(name == b"transfer-encoding" for name, _ in scope["headers"])
    target: bytes = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    lines = [b"%b %b HTTP/1.1" % (scope["method"].encode(), target), *(b"%b: %b" % header for header in headers)]
    lines += [b"connection: close", *([b"transfer-encoding: chunked"] if chunked else []), b"", b""]
    return b"\r\n".join(lines), chunked


def end_to_end(headers: Iterable[Header]) -> list[Header]:
    """The headers without those of one connection, and without those that `connection` names."""
    headers = list(headers)
    named = {part.strip().lower() for name, value in headers if name == b"connection" for part in value.split(b",")}
    dropped = HOP_BY_HOP | named - FRAMING
    return [header for header in headers if header[0] not in dropped]


async def _refuse(send: Send, status: int, message: str) -> None:
    body = ApiError(status, message, "service_unavailable").body()
    await _answer(send, status, body, (b"retry-after", b"1"))


async def _answer(send: Send, status: int, body: bytes, *more: Header) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
