"""A client's connection over HTTP/1, with limits on what it may send, and how long it may take.

`HttpServer` looks once a second for connections that are overdue, so that no request pays for a timer. Each complete
head becomes an exchange (`api.http.exchange`), which is told of its body, and answers.
"""

import asyncio
import logging
from collections import deque
from http import HTTPStatus
from itertools import chain, islice
from typing import Any, Literal, Protocol

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from msgspec import Struct

from api.errors import ApiError, internal, invalid
from api.http.path import TO_CHECK, waits_for_100

MAX_EARLY_BYTES = 64 * 1024  # bodies that come while earlier requests of their connection are answered
LONG_READ_BYTES = 64 * 1024  # a longer read means that there is more, and others wait
KEEP_ALIVE_S = 75  # longer than routers and clients keep idle connections, so that none is closed under a request
STATUS_LINES = {status.value: b"HTTP/1.1 %d %s\r\n" % (status, status.phrase.encode()) for status in HTTPStatus}

log = logging.getLogger(__name__)


class Limits(Struct, frozen=True, kw_only=True):
    connections: int = 4096
    spare_connections: int = 64  # beyond those, for probes
    pipelined: int = 16  # requests that are sent before the first one is answered
    head_bytes: int = 65536  # request line and headers
    head_s: float = 10.0  # the time since the connection, or since the head's first byte
    body_s: float = 30.0  # the time without a byte
    whole_body_s: float = 300.0  # the time since its head
    spare_s: float = 1.0  # the time of a whole probe
    closing_s: float = 2.0  # the client may still read why it is cut off; what it sends is dropped


class Connections:
    """The state that all connections of a server share."""

    def __init__(self) -> None:
        self.open: dict[HttpConnection, None] = {}  # the oldest is first
        self.tasks: set[asyncio.Task[None]] = set()  # apps run in them
        self.retiring = False  # no connection takes another request after its answer

    def are_unread(self) -> bool:
        """Tell whether a client has yet to read a part of complete answers."""
        return any(not each._open and each.transport.get_write_buffer_size() for each in self.open)


class AnyExchange(Protocol):
    """A request and its answer, as the connection sees them."""

    keep_alive: bool
    more_body: bool  # the request has not come whole
    body: bytearray  # it holds what nobody has taken yet
    unheeded_bytes: int  # `set` need not be called for a body of up to this size
    disconnected: bool
    response_started: bool
    response_complete: bool

    def begin(self) -> None:
        """Its turn has come: all earlier requests of the connection are answered."""

    def set(self) -> None:
        """Part of its body has come, or the client has left."""

    def full(self) -> None: ...
    def ready(self) -> None: ...


class HttpConnection(asyncio.Protocol):
    transport: asyncio.Transport
    parser: HttpRequestParser

    def __init__(self, shared: Connections, limits: Limits) -> None:
        self.shared = shared
        self.loop = asyncio.get_running_loop()
        self.write_paused = False
        self._limits = limits
        self._open: deque[AnyExchange] = deque()  # requests without a complete answer, oldest first
        self._exchange: AnyExchange | None = None  # the newest
        self._awaited: Literal["", "head", "body", "end"] = "head"  # the part that the client has begun, or owes us
        self._since_s = self._body_since_s = self._idle_since_s = self.loop.time()
        self._spare = self._retiring = False
        self._spoken = False  # whether a byte has ever come
        self._read_paused = False
        self._undigested_bytes = 0  # those of a head, of trailers, or that the parser has taken without telling us
        self._refusal: ApiError | None = None
        self._declined = b""  # the head that asks for another protocol, without that
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._new_parser()

    def _new_parser(self) -> None:
        self.parser = HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # more requests may follow

    def _exchange_for(self, method: str, version: str, *, keep_alive: bool, waits_for_100: bool) -> AnyExchange:
        """Make the exchange of a request whose head is complete; raise ApiError to refuse it and end the connection."""
        raise NotImplementedError

    # ---- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        address: Any = transport.get_extra_info("peername")
        self.client: tuple[str, int] | None = (str(address[0]), int(address[1])) if isinstance(address, tuple) else None
        self.scheme = "http" if transport.get_extra_info("sslcontext") is None else "https"
        self.shared.open[self] = None
        beyond = len(self.shared.open) - self._limits.connections
        if beyond > self._limits.spare_connections:
            transport.abort()
        self._spare = beyond > 0

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self.shared.open.pop(self, None)
        for exchange in self._open:
            exchange.disconnected = True
            exchange.set()
        self._open.clear()
        # Both lead back to us: such a cycle of references would wait for the collector, with all headers.
        self._exchange = None
        del self.parser

    def shutdown(self) -> None:
        """Finish responses in progress, and close connections whose request is incomplete."""
        for exchange in self._open:
            exchange.keep_alive = False
        if not self._open or (self._awaited == "body" and self._has_turn()):
            self.transport.close()

    def retire(self, *, now: bool) -> None:
        """Make the open request the connection's last one if its response can still say so, or else the next one.

        `now`: it is in any case, and where none has begun the connection closes, maybe as one is sent.
        """
        self._retiring = True
        if self._open:
            if now or not self._open[-1].response_started:
                self._open[-1].keep_alive = False
        elif now and not (self._awaited and self._spoken):
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        if len(data) >= LONG_READ_BYTES and not self.transport.is_closing():
            # Read on in the next iteration: libuv would read 32 times first, 8 MB for each client.
            self.transport.pause_reading()
            self.loop.call_soon(self._read_on)
        if self._awaited == "end":
            return
        self._spoken = True
        if not self._awaited and not self._open:
            # Perhaps it is a stray line end; but the connection is not idle any more.
            self._awaited, self._since_s = "head", self.loop.time()
        elif self._awaited == "body":
            self._since_s = self.loop.time()
        self._undigested_bytes += len(data)
        try:
            while True:
                try:
                    self.parser.feed_data(data)
                    break
                except HttpParserUpgrade as upgrade:
                    # We decline, and read the head again, without the upgrade.
                    data = b"".join((self._declined, memoryview(data)[upgrade.args[0] :]))
                    self._declined = b""
                    self._new_parser()  # the old one reads no more where the connection is to close
        except HttpParserError as error:
            if isinstance(error.__context__, _Enough | None):
                self._refuse(self._refusal or invalid("Invalid HTTP request received."))
            else:
                log.error("A request failed", exc_info=error.__context__)
                self._refuse(internal())
        if self._undigested_bytes > self._limits.head_bytes:
            self._refuse(self._too_large())

    def _read_on(self) -> None:
        if not (self._read_paused or self.transport.is_closing()):
            self.transport.resume_reading()

    def pause_reading(self) -> None:
        if not (self._read_paused or self.transport.is_closing()):
            self._read_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self._read_paused:
            self._read_paused = False
            if not self.transport.is_closing():
                self.transport.resume_reading()

    def pause_writing(self) -> None:
        self.write_paused = True
        if self._open:
            self._open[0].full()

    def resume_writing(self) -> None:
        self.write_paused = False
        if self._open:
            self._open[0].ready()

    # ---- what the parser finds

    def on_message_begin(self) -> None:
        if self._awaited == "end":
            raise _Enough
        if len(self._open) >= self._limits.pipelined:
            # The last one taken says that the connection closes; the client sends the rest again (RFC 9112, 9.3.2).
            self._open[-1].keep_alive = False
            self._awaited = "end"
            raise _Enough
        if self._awaited != "head":
            self._awaited, self._since_s = "head", self.loop.time()
        self._undigested_bytes = 0
        self._url, self._headers = b"", []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._undigested_bytes = 0
        parser = self.parser
        if parser.should_upgrade():
            self._decline_upgrade()
            return
        version = parser.get_http_version()
        is_old, waits, by_name = version == "1.0", False, dict(self._headers)
        size = len(self._url) + sum(map(len, chain.from_iterable(self._headers))) + 4 * len(self._headers)
        if size > self._limits.head_bytes:  # a head that came whole; others are refused before they are complete
            raise self._enough(self._too_large())
        lasts = not (is_old or self._spare or self._retiring or self.shared.retiring) and parser.should_keep_alive()
        method = parser.get_method().decode("ascii")
        try:
            if b"host" not in by_name or len(by_name) < len(self._headers) or not TO_CHECK.isdisjoint(by_name):
                waits = waits_for_100(self._headers, is_old=is_old)
            exchange = self._exchange_for(method, version, keep_alive=lasts, waits_for_100=waits)
        except ApiError as error:
            raise self._enough(error) from error
        self._headers = []  # trailers are no headers of the request (RFC 9110, 6.5.1)
        self._exchange = exchange
        self._open.append(exchange)
        self._awaited = "body"
        self._since_s = self._body_since_s = self.loop.time()
        if len(self._open) == 1:
            exchange.begin()

    def _decline_upgrade(self) -> None:
        """Answer in HTTP/1.1, as a server may (RFC 9110, 7.8), and read the body, which the parser would leave out."""
        headers = [(name, value) for name, value in self._headers if name != b"upgrade"]
        if len(headers) == len(self._headers):  # CONNECT is no request for another protocol here, but for another host
            raise self._enough(invalid("CONNECT asks for a tunnel; this server is no proxy"))
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = b"".join(b"%b: %b\r\n" % header for header in headers)
        self._declined = b"%b %b HTTP/%b\r\n%b\r\n" % (method, self._url, version, lines)

    def on_body(self, body: bytes) -> None:
        self._undigested_bytes = 0
        exchange = self._exchange
        if exchange is not None and not exchange.response_complete:
            exchange.body += body
            if len(exchange.body) > exchange.unheeded_bytes:
                exchange.set()
            if len(self._open) > 1:
                self.pause_if_early()

    def pause_if_early(self) -> None:
        """Pause reading while pipelined requests have long bodies: they are not admitted yet."""
        if sum(len(exchange.body) for exchange in islice(self._open, 1, None)) > MAX_EARLY_BYTES:
            self.pause_reading()

    def on_message_complete(self) -> None:
        if self._declined:
            return
        self._undigested_bytes = 0
        if self._awaited != "end":
            self._awaited = ""
        exchange = self._exchange
        if exchange is not None and not exchange.response_complete:
            exchange.more_body = False
            exchange.set()

    def _enough(self, error: ApiError) -> "_Enough":
        self._refusal = error
        return _Enough()

    # ---- the answers

    def answered(self, *, keep_alive: bool, unread: bool) -> None:
        """The oldest exchange is answered; `unread`: its body has not come to its end."""
        if not keep_alive:
            if unread:
                # Discard input for a moment first: a client that still sends would not read the response.
                self._end()
                self.resume_reading()
                self._write_eof()
            else:
                self.transport.close()
        if self._open:
            self._open.popleft()
        if self.transport.is_closing():
            return
        if self._read_paused:
            self.resume_reading()
        if self._open:
            self._open[0].begin()
            self.pause_if_early()
        else:
            self._idle_since_s = self.loop.time()

    def _write_eof(self) -> None:
        if self.transport.can_write_eof():
            self.transport.write_eof()

    # ---- limits

    def end_if_overdue(self, now_s: float) -> None:
        if self.transport.is_closing():
            return
        if not self._awaited:
            if not self._open and now_s - self._idle_since_s > KEEP_ALIVE_S:
                self.transport.close()
            return
        if self._awaited != "end" and (self._read_paused or not self._has_turn()):
            self._since_s = self._body_since_s = now_s  # the client is waiting for us
            return
        waited_s = now_s - self._since_s
        match self._awaited:
            case "head" if waited_s >= (self._limits.spare_s if self._spare else self._limits.head_s):
                self._refuse(self._too_slow("the headers were not complete", self._limits.head_s))
            case "body" if waited_s >= (self._limits.spare_s if self._spare else self._limits.body_s):
                self._refuse(self._too_slow("no more of the body came", self._limits.body_s))
            case "body" if now_s - self._body_since_s >= self._limits.whole_body_s:
                self._refuse(self._too_slow("the body was not complete", self._limits.whole_body_s))
            case "end" if waited_s >= self._limits.closing_s and not self._open:
                self.transport.abort()

    def _end(self) -> None:
        """Take no more requests: the client is to end the connection."""
        self._awaited, self._since_s = "end", self.loop.time()

    def _has_turn(self) -> bool:
        """Tell whether all requests before the one being received have been answered."""
        return not self._open or (self._awaited == "body" and self._open[0] is self._exchange)

    def _refuse(self, error: ApiError) -> None:
        """Send the refusal unless a response has started, and close once the client can have read it."""
        if self._awaited == "end":
            return
        if self._open and self._awaited != "body":  # requests that came whole before it are answered first
            self._open[-1].keep_alive = False
            self._end()
            return
        exchange = self._exchange if self._awaited == "body" else None
        begun = exchange is not None and (exchange.response_started or not self._has_turn())
        self._end()
        if begun or not self._spoken or self.transport.is_closing():
            self.transport.close()
            return
        body = error.body()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINES[error.status] + head + body)
        for unanswered in self._open:
            unanswered.disconnected = True  # nothing more is written
            unanswered.set()
        self._open.clear()
        self.resume_reading()
        self._write_eof()

    def _too_large(self) -> ApiError:
        message = f"the headers have more than {self._limits.head_bytes} bytes; send less"
        return ApiError(431, message, code="headers_too_large")

    def _too_slow(self, what: str, limit_s: float) -> ApiError:
        message = f"{what} within {limit_s:g} s; send the request again, at once"
        return ApiError(408, message, code="request_timeout")


class _Enough(Exception):
    """Stops the parser."""
