"""Handlers of requests that bypass the app: they admit and count a request, and start its work.

Each opening is called with its route, from the table, and admits for that one.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from api.errors import ApiError, draining
from api.generation_apis import CHAT, COMPLETIONS, GenerationApi
from api.http.routes import Route
from router.core import Router
from router.proxy.admission import Admitted
from router.proxy.exchange import Exchange
from router.proxy.headers import value_of
from router.proxy.kinds import OUR_OWN, Kinds
from router.proxy.request import Request
from router.proxy.rewriting import serve_rewritten

Opening: TypeAlias = Callable[[Exchange], None]


class Openings:
    def __init__(self, router: Router, routes: tuple[Route, ...], kinds: Kinds = OUR_OWN) -> None:
        self._kinds = kinds
        self.by_route: dict[Route, Opening] = {route: partial(route.endpoint, self, route) for route in routes}
        self._router = router
        self._cors = {origin.encode() for origin in router.config.cors_origins}

    def refused(self, error: ApiError) -> Opening:
        """A handler for a request with an invalid target."""

        def refuse(exchange: Exchange) -> None:
            self._router.history.turned_away(exchange.scope, error)
            raise error

        return refuse

    # ---- what the table names

    def chat(self, route: Route, exchange: Exchange) -> None:
        self._generation(route, exchange, CHAT)

    def completion(self, route: Route, exchange: Exchange) -> None:
        self._generation(route, exchange, COMPLETIONS)

    def forward(self, route: Route, exchange: Exchange) -> None:
        """Forward a body that may be a prompt; it must be JSON if the key has a cache salt.

        Engines keep the KV of what they embed, score or classify too: how long that takes tells what others have sent.
        """
        self._forwarding(route, exchange, caches=True, only_computes=True)

    def forward_unknown(self, route: Route, exchange: Exchange) -> None:
        """Forward a request whose effects are not known: it goes to one replica."""
        self._forwarding(route, exchange, caches=True)

    def messages(self, route: Route, exchange: Exchange) -> None:
        self._conversing(route, exchange, "messages")

    def responses(self, route: Route, exchange: Exchange) -> None:
        self._conversing(route, exchange, "responses")

    def batch(self, route: Route, exchange: Exchange) -> None:
        self._conversing(route, exchange, "batch")

    def of_response(self, route: Route, exchange: Exchange) -> None:
        """Forward a request about a response to the replica that holds it."""
        admitted = self._admitted(route, exchange)
        forwarding = self._kinds.of_response(self._router, exchange, admitted, self._router.now_s(), caches=True)
        self._expect(exchange, forwarding)

    def of_model(self, route: Route, exchange: Exchange) -> None:
        """Forward a question about a model to one of its replicas."""
        self._forwarding(route, exchange, only_computes=True, query_names_model=True)

    def forward_as_it_is(self, route: Route, exchange: Exchange) -> None:
        """Forward a body of any kind, to an endpoint without a cache."""
        self._forwarding(route, exchange, only_computes=True)

    # ---- parts

    def _generation(self, route: Route, exchange: Exchange, api: GenerationApi) -> None:
        admitted = self._admitted(route, exchange)
        generation = self._kinds.generation(self._router, exchange, admitted, self._router.now_s(), api=api)
        self._expect(exchange, generation)

    def _forwarding(self, route: Route, exchange: Exchange, **kind: Any) -> None:
        admitted = self._admitted(route, exchange)
        forwarding = self._kinds.forwarding(self._router, exchange, admitted, self._router.now_s(), **kind)
        self._expect(exchange, forwarding)

    def _conversing(self, route: Route, exchange: Exchange, api: str) -> None:
        admitted = self._admitted(route, exchange)
        now_s = self._router.now_s()
        conversing = self._kinds.conversing(self._router, exchange, admitted, now_s, caches=True, api=api)
        self._expect(exchange, conversing)

    def _expect(self, exchange: Exchange, request: Request) -> None:
        config = self._router.config
        exchange.expect(partial(serve_rewritten, request), config.max_body_bytes, self._router.bodies)

    def _admitted(self, route: Route, exchange: Exchange) -> Admitted:
        router, scope = self._router, exchange.scope
        headers = scope["headers"]
        if self._cors:
            self._allow_origin(exchange, headers)
        try:
            if router.draining:
                raise draining()
            admitted = router.admission.admit(
                headers,
                route.who,
                scope["client"],
                router.now_s(),
                path=scope["path"],
                http_version=scope["http_version"],
            )
        except ApiError as error:
            router.history.turned_away(scope, error)
            raise
        exchange.extra += admitted.id_line
        router.open_requests += 1
        return admitted

    def _allow_origin(self, exchange: Exchange, headers: list[tuple[bytes, bytes]]) -> None:
        origin = value_of(headers, b"origin")
        if origin is not None and (origin in self._cors or b"*" in self._cors):
            exchange.extra = b"access-control-allow-origin: %b\r\nvary: origin\r\n" % origin
