"""Begins the requests that bypass the app: each is admitted for its own route, and counted."""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from api.errors import ApiError, draining
from api.http.routes import Route
from router.proxy.exchange import Exchange
from router.proxy.headers import DIRECT, Transport, value_of
from router.proxy.reading import serve
from router.proxy.request import Request
from router.proxy.services import Services

Opening: TypeAlias = Callable[[Exchange], None]


class Openings:
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
