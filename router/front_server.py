"""The HTTP server of a front: uvicorn, with limits on what a client may send before it has asked for anything."""

import asyncio
import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from api.errors import ApiError

KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so that none is closed under a request
HEAD_TIMEOUT_S = 30.0  # from the connection, or from a request's first byte, to the end of its headers
MAX_HEAD_BYTES = 64 * 1024
LINGER_S = 1.0  # for a refusal to be read


class HeadTooLong(Exception):
    """The request line and the headers are longer than MAX_HEAD_BYTES."""


class FrontProtocol(HttpToolsProtocol):
    """Bounds a request's head in bytes and in time, and tells every request of a connection when that is lost."""

    def __init__(self, *arguments: Any, head_timeout_s: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head_timeout_s = head_timeout_s
        self._head_bytes = 0
        self._in_head = True
        self._refused = False
        self._deadline: asyncio.TimerHandle | None = None
        self._open: list[RequestResponseCycle] = []

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._limit(self._head_timeout_s)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self._refused:
            self._refuse()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._deadline is None:
            self._limit(self._head_timeout_s)

    def on_headers_complete(self) -> None:
        if sum(len(name) + len(value) for name, value in self.headers) + len(self.url) > MAX_HEAD_BYTES:
            raise HeadTooLong  # for the parser to stop, and then `send_400_response`
        self._in_head = False
        self._end_limit()
        super().on_headers_complete()
        self._open = [cycle for cycle in (*self._open, self.cycle) if not cycle.response_complete]

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head, self._head_bytes = True, 0

    def send_400_response(self, msg: str) -> None:
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse()
        else:
            super().send_400_response(msg)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_limit()
        for cycle in self._open:  # uvicorn itself tells only the last of pipelined requests
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # left running where the client reset the connection

    def _refuse(self) -> None:
        """Drop what the client still sends: closed while it sends, it would not read the refusal."""
        self._refused = True
        body = ApiError(431, f"the headers are longer than {MAX_HEAD_BYTES:,} bytes", "invalid_request_error").body()
        head = (
            b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\nconnection: close\r\n"
        )
        self.transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        self._limit(LINGER_S)

    def _limit(self, seconds: float) -> None:
        self._end_limit()
        self._deadline = self.loop.call_later(seconds, self.transport.close)

    def _end_limit(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class FrontServer(uvicorn.Server):
    """Serves an app on a socket that is bound already, and leaves the signals to its owner."""

    def __init__(self, app: ASGIApp, drain_timeout_s: float = 60.0, head_timeout_s: float = HEAD_TIMEOUT_S) -> None:
        config = uvicorn.Config(
            app,
            http=functools.partial(FrontProtocol, head_timeout_s=head_timeout_s),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # an answer that breaks off is logged by the app, by the replica's name
            access_log=False,
            server_header=False,  # the replica's own headers pass through
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=math.ceil(drain_timeout_s),
        )
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
