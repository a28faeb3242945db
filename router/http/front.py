"""A client's connection. Requests for replicas bypass ASGI, which would cost a task and more for each.

All others are the app's (`app.py`). Limits are those of `api.http.connection`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from starlette.types import ASGIApp

from api.errors import ApiError, draining
from api.http.connection import AnyExchange, Connections, HttpConnection, Limits
from api.http.exchange import CONTINUE, AsgiConnection, HttpAnswer
from api.http.path import parse_target, raw_path
from api.http.routes import Route, RouteTable
from router.prompts.model_rewrites import NO_RULES
from router.proxy.exchange import Exchange
from router.proxy.headers import DIRECT, Transport, value_of
from router.proxy.reading import read, rewrite
from router.proxy.request import Request
from router.proxy.services import Services

MAX_SHOWN = 256  # characters of a target that is none, in the access log

Opening: TypeAlias = Callable[[Exchange], None]


class Openings:
    """Begins the requests that bypass the app: each is admitted for its own route, and counted."""

    def __init__(self, services: Services, routes: tuple[Route, ...], transport: Transport = DIRECT) -> None:
        self._transport = transport
        self.by_route: dict[Route | None, Opening] = {route: partial(self._begin, route) for route in routes}
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
        if self._cors:
            origin = value_of(scope["headers"], b"origin")
            if origin is not None and (origin in self._cors or b"*" in self._cors):
                exchange.extra = b"access-control-allow-origin: %b\r\nvary: origin\r\n" % origin
        try:
            if services.lifecycle.draining:
                raise draining()
            admitted = services.admission.admit(scope, route.who, now_s)
        except ApiError as error:
            services.history.turned_away(scope, error)
            raise
        exchange.extra += admitted.id_line
        services.lifecycle.open_requests += 1
        request = Request(services, exchange, admitted, now_s, route.endpoint, self._transport)
        serve = read if services.model_rewrites is NO_RULES else rewrite
        exchange.expect(partial(serve, request), services.config.max_body_bytes, services.bodies)


@dataclass(slots=True, eq=False, kw_only=True)
class HttpExchange(HttpAnswer, Exchange):
    """A client's exchange over HTTP/1."""

    connection: HttpConnection
    _head: bytes | None = None
    _chunked: bool = False
    _bodiless: bool = False

    def _let_body_come(self) -> None:
        self.connection.transport.write(CONTINUE)

    @property
    def unread_bytes(self) -> int:
        return self.connection.transport.get_write_buffer_size()

    def abandon(self) -> None:
        self.connection.transport.abort()  # closing would wait for it


class FrontConnection(AsgiConnection):
    def __init__(
        self, shared: Connections, limits: Limits, app: ASGIApp, table: RouteTable, openings: Openings
    ) -> None:
        super().__init__(shared, limits, app)
        self._table = table
        self._openings = openings

    def _exchange_for(self, method: str, version: str, *, keep_alive: bool, waits_for_100: bool) -> AnyExchange:
        raw, query = self._url, b""
        usual = self._table.usual.get(raw)
        asked = None if usual is None else usual.get(method)
        opens: Opening | None
        try:
            if asked is None:
                target = parse_target(raw, self._headers)
                asked = self._table.find(method, target.path)
                raw, query = raw_path(target.path), target.query
            path, opens = asked.text, self._openings.by_route.get(asked.route)
        except ApiError as error:
            opens, path, raw = self._openings.refused(error), raw[:MAX_SHOWN].decode("latin-1"), b""
        scope = self._scope(method, path, raw, query, version)
        if opens is None or self._spare:
            return self._of_app(scope, keep_alive=keep_alive, waits_for_100=waits_for_100)
        return HttpExchange(scope, opens, keep_alive=keep_alive, waits_for_100=waits_for_100, connection=self)
