"""The simplest front: each request goes to the next replica, whatever its cache holds.

It stands where the cache-aware router will stand. It keeps nothing: bodies and streams pass through as they come, each
request on a connection of its own, so that a replica's death costs only the requests that it was answering.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import httptools
import uvicorn
from starlette.types import Receive, Scope, Send

from api.errors import ApiError

log = logging.getLogger(__name__)

CHUNK_BYTES = 64 * 1024
MAX_HEAD_BYTES = 64 * 1024
CONNECT_TIMEOUT_S = 2.0
KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so that none is closed under a request
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


class Exchange(NamedTuple):
    """One request and the replica that answers it."""

    replica: Replica
    scope: Scope
    receive: Receive
    send: Send


class BrokenAnswer(Exception):
    """The replica's answer ended before it was complete, or is not HTTP."""


class RoundRobin:
    """An ASGI app; `replicas` are those that are ready, and may change at any time."""

    def __init__(self, replicas: Iterable[Replica] = ()) -> None:
        self.replicas = list(replicas)
        self._turn = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "served without lifespan and websockets"
        if scope["path"] == "/health":
            await _answer(send, 200, b'{"status":"ok"}')
        elif scope["path"] == "/ready" and self.replicas:
            await _answer(send, 200, b'{"status":"ready"}')
        elif scope["path"] == "/ready":
            await _refuse(send, 503, "no replica is ready")
        else:
            await self._forward(scope, receive, send)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        for replica in self._in_turn():
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    reader, writer = await asyncio.open_connection(replica.host, replica.port)
            except OSError as error:
                log.warning("%s takes no connection (%s); the next one is asked", replica.name, error)
                continue
            try:
                await _relay(Exchange(replica, scope, receive, send), reader, writer)
            finally:
                writer.transport.abort()  # the answer is complete, or nobody wants the rest
            return
        await _refuse(send, 503, "no replica takes connections")

    def _in_turn(self) -> list[Replica]:
        """All replicas, beginning with the one whose turn it is."""
        first = self._turn % max(1, len(self.replicas))
        self._turn = first + 1
        return self.replicas[first:] + self.replicas[:first]


async def _relay(exchange: Exchange, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass the request on and the answer back at the same time, until the answer ends or the client leaves."""
    upload = asyncio.create_task(_upload(exchange, writer))
    download = asyncio.create_task(_download(exchange, reader))
    try:
        await asyncio.wait({upload, download}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (upload, download):
            task.cancel()
        await asyncio.gather(upload, download, return_exceptions=True)
    for task in (upload, download):
        if not task.cancelled():
            task.result()


async def _upload(exchange: Exchange, writer: asyncio.StreamWriter) -> None:
    """Send the request, then wait for the client to leave."""
    head, chunked = request_head(exchange.scope)
    with contextlib.suppress(OSError):  # the replica reads no further; its answer says why
        writer.write(head)
        more = True
        while more:
            message = await exchange.receive()
            if message["type"] == "http.disconnect":
                return
            part, more = message.get("body", b""), message.get("more_body", False)
            if part:
                writer.write(b"%x\r\n%b\r\n" % (len(part), part) if chunked else part)
            if chunked and not more:
                writer.write(b"0\r\n\r\n")
            await writer.drain()
    while (await exchange.receive())["type"] != "http.disconnect":
        pass


async def _download(exchange: Exchange, reader: asyncio.StreamReader) -> None:
    """Send the answer to the client as it comes."""
    replica, send = exchange.replica, exchange.send
    answer = Answer(bodiless=exchange.scope["method"] == "HEAD")
    begun = False
    try:
        while not answer.complete:
            answer.feed(await reader.read(CHUNK_BYTES))
            if answer.status and not begun:
                begun = True
                headers = [*end_to_end(answer.headers), (ANSWERED_BY, replica.name.encode())]
                await send({"type": "http.response.start", "status": answer.status, "headers": headers})
            if body := answer.take_body():
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
    except (BrokenAnswer, OSError) as error:
        log.warning("%s broke off its answer: %s", replica.name, error)
        if not begun:
            await _refuse(send, 502, f"{replica.name} ended the connection without an answer")
        # An answer that has begun stays incomplete: the server sees that, and closes the client's connection.


class Answer:
    """What the replica has answered so far, out of the bytes fed."""

    def __init__(self, *, bodiless: bool) -> None:
        self.status = 0
        self.headers: list[Header] = []
        self.complete = False
        self._bodiless = bodiless
        self._body: list[bytes] = []
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


class FrontServer(uvicorn.Server):
    """Serves an app on a socket that is bound already, and leaves the signals to its owner."""

    def __init__(self, app: RoundRobin, drain_timeout_s: int = 60) -> None:
        config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # an answer that breaks off is logged here, by the replica's name
            access_log=False,
            server_header=False,  # the replica's own headers pass through
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=drain_timeout_s,
        )
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
