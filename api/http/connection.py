"""uvicorn's HTTP protocol with limits on what a client may send, and how long it may take.

`HttpServer.on_tick` looks once a second for connections that are overdue, so that no request pays for a timer.
"""

import asyncio
from collections import deque
from itertools import islice
from typing import Any, Literal

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from msgspec import Struct
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from api.errors import ApiError, invalid
from api.http.path import parse_target
from api.http.responses import error_response

PROBE = "/health"
MAX_EARLY_BYTES = 64 * 1024  # bodies that come while earlier requests of their connection are answered
LONG_READ_BYTES = 64 * 1024  # a longer read means that there is more, and others wait


class Limits(Struct, frozen=True, kw_only=True):
    connections: int = 4096
    spare_connections: int = 64  # beyond those, for probes
    pipelined: int = 16  # requests that are sent before the first one is answered
    head_bytes: int = 65536  # request line and headers
    head_s: float = 10.0  # the time since the connection, or since the head's first byte
    body_s: float = 30.0  # the time without a byte
    whole_body_s: float = 300.0  # the time since its head
    spare_s: float = 1.0  # the time of a whole probe
    closing_s: float = 2.0  # a client may read why it is cut off so long, while the rest that it sends is dropped


class State(ServerState):
    """The state that all connections of a server share."""

    retiring = False  # no connection takes another request after its answer


class HttpProtocol(HttpToolsProtocol):
    server_state: State

    def __init__(self, limits: Limits, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._limits = limits
        self._open: deque[RequestResponseCycle] = deque()  # requests without a complete answer, oldest first
        self._awaited: Literal["", "head", "body", "end"] = "head"  # the part that the client has begun, or owes us
        self._since_s = self._body_since_s = self.loop.time()
        self._spare = False
        self._spoken = False  # whether a byte has ever come
        self._head_bytes = 0
        self._undigested_bytes = 0  # bytes that the parser has taken without telling us anything
        self._refusal: ApiError | None = None
        self._declined = b""  # the head that asks for another protocol, without that

    # ---- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        beyond = len(self.connections) - self._limits.connections
        if beyond > self._limits.spare_connections:
            transport.abort()
        elif beyond > 0:
            self._spare = True
            self.app = _only_probes(self.app)

    def connection_lost(self, exc: Exception | None) -> None:
        # Uvicorn's own tells only the last of pipelined requests, and may leave a timer.
        for cycle in self._open:
            cycle.disconnected = True
            cycle.message_event.set()
        self._open.clear()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # left running where the client reset the connection
        # Both lead back to us: such a cycle of references would wait for the collector, with all headers.
        self.cycle = self.scope = None  # type: ignore[assignment]

    def shutdown(self) -> None:
        """Finish responses in progress, and close connections whose request is incomplete."""
        for cycle in self._open:
            cycle.keep_alive = False
        if not self._open or (self._awaited == "body" and self._has_turn()):
            self.transport.close()

    def retire(self, *, now: bool) -> None:
        """Make the open request the connection's last one, if its response can still say so.

        `now`: it is in any case, and where none has begun the connection closes. A client that sends one at that moment
        finds it closed, and cannot know whether it was heard.
        """
        if self._open:
            if now or not self._open[-1].response_started:
                self._open[-1].keep_alive = False
        elif now and not (self._awaited and self._spoken):
            self.transport.close()

    def abort(self) -> None:
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._awaited != "end":
            self._spoken = True
            if not self._awaited and not self._open:
                self._await("head")  # perhaps a stray line end; but it has stopped the timer of idle connections
            elif self._awaited == "body":
                self._since_s = self.loop.time()
            self._undigested_bytes += len(data)
            self._unset_keepalive_if_required()
            self._feed(data)
            if self._undigested_bytes > self._limits.head_bytes and not self._is_cut_off():
                self._refuse(self._too_large())
        if len(data) >= LONG_READ_BYTES:
            self._let_others_read()

    def _let_others_read(self) -> None:
        """Continue reading in the next loop iteration: libuv would read 32 times first, 8 MB for each client."""
        if not self.transport.is_closing():
            self.transport.pause_reading()
            self.loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        if not (self.flow.read_paused or self.transport.is_closing()):
            self.transport.resume_reading()

    def _feed(self, data: bytes) -> None:
        """Feed the parser; after an upgrade request, which we decline, feed it the head again without the upgrade."""
        while True:
            try:
                self.parser.feed_data(data)
                return
            except HttpParserUpgrade as upgrade:
                data = b"".join((self._declined, memoryview(data)[upgrade.args[0] :]))
                self._declined = b""
                parser = HttpRequestParser(self)
                parser.set_dangerous_leniencies(lenient_data_after_close=True)  # uvicorn does the same
                self.parser = parser  # the old one reads no more where the connection is to close
            except HttpParserError:
                self.logger.warning("Invalid HTTP request received.")
                self.send_400_response("Invalid HTTP request received.")
                return

    # ---- what the parser finds

    def on_message_begin(self) -> None:
        if self._awaited == "end":
            raise _Enough
        if len(self._open) >= self._limits.pipelined:
            # The last one taken says that the connection closes; the client sends the rest again (RFC 9112, 9.3.2).
            self._open[-1].keep_alive = False
            self._awaited = "end"
            raise _Enough
        self._undigested_bytes = 0
        if self._awaited != "head":
            self._await("head")
        self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + 4)  # trailers are counted with the head
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._digested()
        if self.parser.should_upgrade():
            self._decline_upgrade()
            return
        self._check_head()
        try:
            self.url = parse_target(self.url, self.headers).raw
        except ApiError as error:
            self._refusal = error
            raise _Enough from error
        self._begin_cycle()

    def _check_head(self) -> None:
        """Refuse what the parser takes although servers read it differently."""
        hosts = 0
        for name, value in self.headers:
            if name == b"host":
                hosts += 1
            elif name == b"transfer-encoding" and value.strip(b" \t").lower() != b"chunked":
                # The parser reads `gzip, chunked` as chunked, and what comes out would be taken for the body.
                message = "a Transfer-Encoding other than chunked is not known here; send the body as it is, or chunked"
                self._refusal = ApiError(501, message, code="transfer_encoding_unknown")
                raise _Enough
        if hosts != 1 and (hosts or self.parser.get_http_version() != "1.0"):
            message = f"the request has {hosts} Host headers; send one (RFC 9112, 3.2)"
            self._refusal = invalid(message, code="invalid_host")
            raise _Enough

    def _decline_upgrade(self) -> None:
        """Answer in HTTP/1.1, as a server may (RFC 9110, 7.8), and read the body, which the parser would leave out."""
        headers = [(name, value) for name, value in self.headers if name != b"upgrade"]
        if len(headers) == len(self.headers):  # CONNECT is no request for another protocol here, but for another host
            self._refusal = invalid("CONNECT asks for a tunnel; this server is no proxy")
            raise _Enough
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = b"".join(b"%b: %b\r\n" % header for header in headers)
        self._declined = b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, lines)

    def _begin_cycle(self) -> None:
        """Pass the request to the app; `url` is parsed and normalized."""
        if self.parser.get_http_version() == "1.0":
            self.expect_100_continue = False  # such a client would take 100 for its answer (RFC 9110, 10.1.1)
        super().on_headers_complete()
        self.headers = []  # trailers are no headers of the request (RFC 9110, 6.5.1)
        self._open.append(self.cycle)
        self._await("body")
        if self._spare or self.server_state.retiring:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._digested()
        super().on_body(body)
        self.pause_if_early()

    def pause_if_early(self) -> None:
        """Pause reading while pipelined requests have long bodies: they are not admitted yet."""
        if len(self._open) > 1 and not self.transport.is_closing():
            waiting = islice(self._open, 1, None)
            if sum(len(cycle.body) for cycle in waiting) > MAX_EARLY_BYTES:
                self.flow.pause_reading()

    def on_message_complete(self) -> None:
        if self._declined:
            return
        self._digested()
        if not self._is_cut_off():
            self._awaited = ""
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._open:
            self._open.popleft()
        super().on_response_complete()
        self.pause_if_early()

    def send_400_response(self, msg: str) -> None:
        """Called for any input that the parser rejects, including our own refusals."""
        if not self._is_cut_off():
            self._refuse(self._refusal or invalid(msg))

    def _count_head(self, size: int) -> None:
        self._digested()
        self._head_bytes += size
        if self._head_bytes > self._limits.head_bytes:
            self._refusal = self._too_large()
            raise _Enough

    def _digested(self) -> None:
        self._undigested_bytes = 0

    # ---- limits

    def end_if_overdue(self, now_s: float) -> None:
        if not self._awaited or self.transport.is_closing():
            return
        if not self._is_cut_off() and (self.flow.read_paused or not self._has_turn()):
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

    def _await(self, awaited: Literal["head", "body", "end"]) -> None:
        self._awaited = awaited
        self._since_s = self._body_since_s = self.loop.time()

    def _is_cut_off(self) -> bool:
        return self._awaited == "end"

    def _has_turn(self) -> bool:
        """Tell whether all requests before the one being received have been answered."""
        return not self._open or (self._awaited == "body" and self._open[0] is self.cycle)

    def _refuse(self, error: ApiError) -> None:
        """Send the refusal unless a response has started, and close once the client can have read it."""
        if self._open and self._awaited != "body":  # requests that came whole before it are answered first
            self._open[-1].keep_alive = False
            self._await("end")
            return
        begun = self._open and (not self._has_turn() or self._open[0].response_started)
        self._await("end")
        if begun or not self._spoken or self.transport.is_closing():
            self.transport.close()
            return
        body = error.body()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[error.status] + head + body)
        for cycle in self._open:
            cycle.disconnected = True  # nothing more is written
            cycle.message_event.set()
        self._open.clear()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _too_large(self) -> ApiError:
        message = f"the headers have more than {self._limits.head_bytes} bytes; send less"
        return ApiError(431, message, code="headers_too_large")

    def _too_slow(self, what: str, limit_s: float) -> ApiError:
        message = f"{what} within {limit_s:g} s; send the request again, at once"
        return ApiError(408, message, code="request_timeout")


class _Enough(Exception):
    """Stops the parser."""


def _only_probes(app: Any) -> ASGIApp:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == PROBE:
            await app(scope, receive, send)
        else:
            message = "too many connections are open; try again, or close some"
            error = ApiError(
                503, message, "service_unavailable", code="too_many_connections", headers={"Retry-After": "1"}
            )
            await error_response(error)(scope, receive, send)

    return answer
