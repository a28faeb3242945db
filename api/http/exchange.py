"""How an exchange's answer is written to its connection, and the exchanges that an ASGI app answers."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import formatdate

from starlette.types import ASGIApp, Message, Scope

from api.errors import ApiError, internal
from api.http.connection import STATUS_LINES, AnyExchange, Connections, HttpConnection, Limits
from api.http.path import parse_target, raw_path
from api.http.responses import error_response

PROBE = "/health"
MAX_UNREAD_BYTES = 64 * 1024  # a connection is not read while its app leaves more of a body
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_CROWDED, _AGAIN = "too many connections are open; try again, or close some", {"Retry-After": "1"}
CROWDED = error_response(ApiError(503, _CROWDED, "service_unavailable", code="too_many_connections", headers=_AGAIN))

log = logging.getLogger(__name__)


class HttpAnswer:
    """Writes an exchange's answer to its connection."""

    __slots__ = tuple[str, ...]()  # its subclasses have the fields

    connection: "HttpConnection"
    scope: Scope
    keep_alive: bool
    more_body: bool
    disconnected: bool
    response_started: bool
    response_complete: bool
    status: int
    sent_bytes: int
    extra: bytes
    more_lines: Callable[[], bytes] | None
    _head: bytes | None  # written with the first part of the body
    _chunked: bool
    _bodiless: bool
    _end: Callable[[], None]

    def start(self, status: int, headers: bytes, *, length: int | None = None) -> None:
        self.response_started = True
        self.status = status
        self._bodiless = self.scope["method"] == "HEAD" or status in (204, 304)
        if length is not None:
            framing = b"content-length: %d\r\n" % length
        elif self._bodiless:
            framing = b""
        elif self.scope["http_version"] == "1.1":
            self._chunked, framing = True, b"transfer-encoding: chunked\r\n"
        else:
            self.keep_alive, framing = False, b""
        if not self.keep_alive:
            framing += b"connection: close\r\n"
        line = STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
        extra = self.extra if self.more_lines is None else self.extra + self.more_lines()
        self._head = b"".join((line, headers, extra, framing, b"\r\n"))

    def flush(self) -> None:
        if self._head is not None and not self.disconnected:
            self.connection.transport.write(self._head)
            self._head = None

    def send(self, body: bytes) -> None:
        if self.disconnected or self._bodiless or not body:
            return
        self.sent_bytes += len(body)
        if self._chunked:
            body = b"%x\r\n%b\r\n" % (len(body), body)
        if self._head is not None:
            body, self._head = self._head + body, None
        self.connection.transport.write(body)

    def chunk_writer(self) -> Callable[[bytes], None] | None:
        return self.connection.transport.write if self._chunked and self._head is None else None

    def finish(self, body: bytes = b"") -> None:
        if self.disconnected or self.response_complete:
            return
        if self._bodiless:
            body = b""
        self.sent_bytes += len(body)
        if self._chunked:
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"
        if self._head is not None:
            body, self._head = self._head + body, None
        if body:
            self.connection.transport.write(body)
        self._end()
        self.connection.answered(keep_alive=self.keep_alive, unread=self.more_body)

    def cut(self) -> None:
        if not self.disconnected:
            self.connection.transport.close()
            self._end()


@dataclass(slots=True, eq=False, kw_only=True)
class AsgiExchange(HttpAnswer):
    """A request that an app answers in a task of its own."""

    app: ASGIApp
    scope: Scope
    connection: HttpConnection
    keep_alive: bool
    waits_for_100: bool
    more_body: bool = True
    disconnected: bool = False
    response_started: bool = False
    response_complete: bool = False
    body: bytearray = field(default_factory=bytearray)
    unheeded_bytes: int = -1
    status: int = 0
    sent_bytes: int = 0
    extra: bytes = b""
    more_lines: None = None
    _head: bytes | None = None
    _chunked: bool = False
    _bodiless: bool = False
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _writable: asyncio.Event = field(default_factory=asyncio.Event)

    # ---- what the connection tells

    def begin(self) -> None:
        if not self.connection.write_paused:
            self._writable.set()
        tasks = self.connection.shared.tasks
        task = self.connection.loop.create_task(self._run())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def set(self) -> None:
        self._changed.set()
        if self.disconnected:
            self._writable.set()
        elif len(self.body) > MAX_UNREAD_BYTES:
            self.connection.pause_reading()

    def full(self) -> None:
        self._writable.clear()

    def ready(self) -> None:
        self._writable.set()

    # ---- what the app asks for

    async def _run(self) -> None:
        try:
            await self.app(self.scope, self._receive, self._send)
        except Exception:
            log.exception("A request failed")
        finally:
            if not (self.response_complete or self.disconnected):
                if self.response_started:
                    self.cut()
                else:
                    body = internal().body()
                    self.keep_alive = False
                    self.start(500, b"content-type: application/json\r\n", length=len(body))
                    self.finish(body)

    async def _receive(self) -> Message:
        if self.waits_for_100 and not self.disconnected:
            self.waits_for_100 = False
            self.connection.transport.write(CONTINUE)
        if not (self.disconnected or self.response_complete):
            self.connection.resume_reading()
            await self._changed.wait()
            self._changed.clear()
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        body, self.body = bytes(self.body), bytearray()
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    async def _send(self, message: Message) -> None:
        await self._writable.wait()
        if self.disconnected:
            return
        if message["type"] == "http.response.start" and not self.response_started:
            self.waits_for_100 = False
            lines, length = [b"date: %b\r\n" % formatdate(time.time(), usegmt=True).encode()], None
            for name, value in message.get("headers", ()):
                if name == b"content-length":
                    length = int(value)
                elif name == b"connection" and value.lower() == b"close":
                    self.keep_alive = False
                else:
                    lines.append(b"%b: %b\r\n" % (name, value))
            self.start(message["status"], b"".join(lines), length=length)
            self.connection.loop.call_soon(self.flush)  # a first part that comes at once goes with it
            return
        if message["type"] != "http.response.body" or not self.response_started or self.response_complete:
            raise RuntimeError(f"the app sent {message['type']!r} out of turn")
        body: bytes = message.get("body", b"")
        if message.get("more_body", False):
            self.send(body)
        else:
            self.finish(body)

    def _end(self) -> None:
        self.response_complete = True
        self.body, self._head = bytearray(), None
        self._changed.set()


class AsgiConnection(HttpConnection):
    """A connection of which an app answers the requests."""

    def __init__(self, shared: Connections, limits: Limits, app: ASGIApp) -> None:
        super().__init__(shared, limits)
        self._app = app

    def _exchange_for(self, method: str, version: str, *, keep_alive: bool, waits_for_100: bool) -> AnyExchange:
        target = parse_target(self._url, self._headers)
        path = "/" + "/".join(target.path)
        scope = self._scope(method, path, raw_path(target.path), target.query, version)
        return self._of_app(scope, keep_alive=keep_alive, waits_for_100=waits_for_100)

    def _scope(self, method: str, path: str, raw: bytes, query: bytes, version: str) -> Scope:
        """Describe a request, for an app or for whoever else answers it."""
        return {
            "method": method,
            "path": path,
            "raw_path": raw,
            "query_string": query,
            "http_version": version,
            "headers": self._headers,
            "client": self.client,
            "scheme": self.scheme,
        }

    def _of_app(self, scope: Scope, *, keep_alive: bool, waits_for_100: bool) -> AsgiExchange:
        scope.update(
            type="http",
            asgi={"version": "3.0", "spec_version": "2.3"},
            root_path="",
            state={"abort": self.transport.abort},  # ends an endless response that the client does not read
        )
        app = CROWDED if self._spare and scope["path"] != PROBE else self._app
        return AsgiExchange(app=app, scope=scope, connection=self, keep_alive=keep_alive, waits_for_100=waits_for_100)
