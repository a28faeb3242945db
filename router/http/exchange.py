"""A client's exchange over HTTP/1: what uvicorn calls a cycle, with the answer written to the connection."""

import asyncio
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

from uvicorn.protocols.http.flow_control import FlowControl

from router.proxy.exchange import Exchange

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
STATUS_LINES = {status.value: b"HTTP/1.1 %d %s\r\n" % (status, status.phrase.encode()) for status in HTTPStatus}


class ClientConnection(Protocol):
    """The client's connection (`router.http.front`)."""

    transport: asyncio.Transport
    flow: FlowControl

    def on_response_complete(self) -> None: ...
    def pause_if_early(self) -> None: ...
    def close_after_answer(self, *, unread: bool) -> None: ...


@dataclass(slots=True, eq=False, kw_only=True)
class HttpExchange(Exchange):
    connection: ClientConnection
    _head: bytes | None = None  # written with the first part of the body
    _chunked: bool = False
    _bodiless: bool = False

    @property
    def message_event(self) -> "HttpExchange":
        """The event that uvicorn sets on a change: the exchange itself. As an attribute it would make a cycle."""
        return self

    def _let_body_come(self) -> None:
        self.connection.transport.write(CONTINUE)

    def _is_early(self) -> None:
        self.connection.pause_if_early()

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
        if not self.keep_alive:
            self.connection.close_after_answer(unread=self.more_body)
        self.connection.on_response_complete()

    def cut(self) -> None:
        if not self.disconnected:
            self.connection.transport.close()
            self._end()

    @property
    def unread_bytes(self) -> int:
        return self.connection.transport.get_write_buffer_size()

    def abandon(self) -> None:
        self.connection.transport.abort()  # closing would wait for it
