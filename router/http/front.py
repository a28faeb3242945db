"""A client's connection. Requests for replicas bypass ASGI, which would cost a task and more for each.

All others are the app's (`app.py`). Limits are those of `api.http.connection`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, TypeAlias

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from api.errors import ApiError, draining
from api.http.connection import HttpProtocol, Limits
from api.http.path import parse_target, raw_path
from api.http.routes import Route, RouteTable
from router.proxy.exchange import Exchange
from router.proxy.headers import DIRECT, Transport, value_of
from router.proxy.reading import serve
from router.proxy.request import Request
from router.proxy.services import Services

MAX_SHOWN = 256  # characters of a target that is none, in the access log
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
STATUS_LINES = {status.value: b"HTTP/1.1 %d %s\r\n" % (status, status.phrase.encode()) for status in HTTPStatus}


Opening: TypeAlias = Callable[[Exchange], None]


class Openings:
    """Begins the requests that bypass the app: each is admitted for its own route, and counted."""

    def __init__(self, services: Services, routes: tuple[Route, ...], transport: Transport = DIRECT) -> None:
        self._transport = transport
        self.by_route: dict[Route, Opening] = {route: partial(self._begin, route) for route in routes}
        self._services = services
        self._cors = {origin.encode() for origin in services.config.cors_origins}

    def refused(self, error: ApiError) -> Opening:
        """A handler for a request with an invalid target."""

        def refuse(exchange: Exchange) -> None:
            self._services.history.turned_away(exchange.scope, error)
            raise error

        return refuse

    def _begin(self, route: Route, exchange: Exchange) -> None:
        services, scope, now_s = self._services, exchange.scope, self._services.now_s()
        headers = scope["headers"]
        if self._cors:
            origin = value_of(headers, b"origin")
            if origin is not None and (origin in self._cors or b"*" in self._cors):
                exchange.extra = b"access-control-allow-origin: %b\r\nvary: origin\r\n" % origin
        try:
            if services.lifecycle.draining:
                raise draining()
            admitted = services.admission.admit(
                headers,
                route.who,
                scope["client"],
                now_s,
                path=scope["path"],
                http_version=scope["http_version"],
            )
        except ApiError as error:
            services.history.turned_away(scope, error)
            raise
        exchange.extra += admitted.id_line
        services.lifecycle.open_requests += 1
        request = Request(services, exchange, admitted, now_s, route.endpoint, self._transport)
        exchange.expect(partial(serve, request), services.config.max_body_bytes, services.bodies)


@dataclass(slots=True, eq=False, kw_only=True)
class HttpExchange(Exchange):
    """A client's exchange over HTTP/1: what uvicorn calls a cycle, with the answer written to the connection."""

    connection: "FrontConnection"
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


class FrontConnection(HttpProtocol):
    def __init__(self, limits: Limits, table: RouteTable, openings: Openings, *arguments: Any, **options: Any) -> None:
        super().__init__(limits, *arguments, **options)
        self._table = table
        self._openings = openings
        self._idle_since_s = 0.0

    # These do the same as the classes above, but each in one call, because every request has some of them.

    def on_url(self, url: bytes) -> None:
        self._undigested_bytes = 0
        self._head_bytes += len(url)
        if self._head_bytes > self._limits.head_bytes:
            self._count_head(0)  # refuses
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._undigested_bytes = 0
        size = self._head_bytes = self._head_bytes + len(name) + len(value) + 4
        if size > self._limits.head_bytes:
            self._count_head(0)  # refuses
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            self._decline_upgrade()
            return
        self._check_head()
        method = self.parser.get_method().decode("ascii")
        raw, query = self.url, b""
        usual = self._table.usual.get(raw)
        asked = None if usual is None else usual.get(method)
        if asked is None:
            opens, path, raw, query = self._find(method, raw)
        else:
            path = asked.text
            opens = None if self._spare or asked.route is None else self._openings.by_route.get(asked.route)
        if opens is None:
            self.scope["state"]["abort"] = self.abort  # ends an endless response that the client does not read
            self._begin_cycle()
            if self._answered_now() is not None:
                self.flow.resume_reading()  # the client's disconnection is noticed by reading
            return
        self._undigested_bytes = 0
        version = self.parser.get_http_version()
        scope = self.scope
        scope["method"], scope["path"], scope["http_version"] = method, path, version
        scope["raw_path"], scope["query_string"] = raw, query
        self.headers = []  # trailers are no headers of the request
        exchange = HttpExchange(
            scope,  # type: ignore[arg-type]
            opens,
            connection=self,
            keep_alive=version != "1.0" and self.parser.should_keep_alive() and not self.server_state.retiring,
            waiting_for_100_continue=self.expect_100_continue and version != "1.0",
        )
        before, self.cycle = self.cycle, exchange  # type: ignore[assignment]
        self._open.append(self.cycle)
        self._await("body")
        if before is None or before.response_complete:
            exchange.begin()
        else:
            self.pipeline.appendleft((self.cycle, self.app))  # read on: the client may leave

    def _find(self, method: str, raw: bytes) -> tuple[Opening | None, str, bytes, bytes]:
        """The handler of a request that bypasses the app, and its path as text, raw path and query."""
        try:
            target = parse_target(raw, self.headers)
            asked = self._table.find(method, target.path)
        except ApiError as error:
            return self._openings.refused(error), raw[:MAX_SHOWN].decode("latin-1"), b"", b""
        self.url = target.raw
        opens = None if self._spare or asked.route is None else self._openings.by_route.get(asked.route)
        return opens, asked.text, raw_path(target.path), target.query

    def on_body(self, body: bytes) -> None:
        exchange: RequestResponseCycle | HttpExchange = self.cycle
        if not isinstance(exchange, HttpExchange):
            super().on_body(body)
            return
        self._undigested_bytes = 0
        if not exchange.response_complete:
            exchange.body += body
            if len(exchange.body) > exchange.unheeded_bytes:
                exchange.set()

    def on_message_complete(self) -> None:
        if self._declined:
            return
        exchange: RequestResponseCycle | HttpExchange = self.cycle
        if not isinstance(exchange, HttpExchange):
            super().on_message_complete()
            return
        self._undigested_bytes = 0
        if self._awaited != "end":
            self._awaited = ""
        if not exchange.response_complete:
            exchange.more_body = False
            exchange.set()

    def on_response_complete(self) -> None:
        # No idle connection has a timer of its own: the sweep ends those.
        if self._open:
            self._open.popleft()
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self.flow.read_paused:
            self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            self.pause_if_early()
        else:
            self._idle_since_s = self.loop.time()

    def end_if_overdue(self, now_s: float) -> None:
        idle = not (self._open or self._awaited or self.transport.is_closing())
        if idle and now_s - self._idle_since_s > self.timeout_keep_alive:
            self.transport.close()
        else:
            super().end_if_overdue(now_s)

    def _start_asgi_task(self, cycle: RequestResponseCycle | HttpExchange, app: Any) -> None:
        if isinstance(cycle, HttpExchange):
            cycle.begin()
        else:
            super()._start_asgi_task(cycle, app)

    def pause_writing(self) -> None:
        super().pause_writing()
        if (exchange := self._answered_now()) is not None:
            exchange.full()

    def resume_writing(self) -> None:
        super().resume_writing()
        if (exchange := self._answered_now()) is not None:
            exchange.ready()

    def _answered_now(self) -> HttpExchange | None:
        cycle: RequestResponseCycle | HttpExchange | None = self._open[0] if self._open else None
        return cycle if isinstance(cycle, HttpExchange) else None

    def close_after_answer(self, *, unread: bool) -> None:
        """Close, but discard input for a moment first: a client that still sends would not read the response."""
        if not unread:
            self.transport.close()
            return
        self._await("end")
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()


def front_protocol(limits: Limits, table: RouteTable, openings: Openings) -> Any:
    return partial(FrontConnection, limits, table, openings)
