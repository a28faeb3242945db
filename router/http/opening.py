"""Which requests go past the app, and how they begin: admitted, counted, and given to who answers them."""

import urllib.parse
from collections.abc import Callable

from api.errors import ApiError, draining
from router.admission import Admitted
from router.core import Router
from router.exchange import Exchange
from router.forwarding import Forwarding
from router.headers import id_line, value_of
from router.routing import Routing

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
FORWARDED = frozenset({"/tokenize", "/detokenize"})
POST_ONLY = FORWARDED | {CHAT, COMPLETIONS}
MODELS, ONE_MODEL = "/v1/models", "/v1/models/"


def is_plain(path: str) -> bool:
    """Whether every server takes it for the same: some resolve dots, join slashes or decode what is decoded already."""
    if "%" in path and urllib.parse.unquote(path) != path:
        return False
    return not any(part in ("", ".", "..") for part in path.split("/")[1:])


class Openings:
    def __init__(self, router: Router) -> None:
        self._router = router
        self._cors = {origin.encode() for origin in router.config.cors_origins}

    def find(self, method: str, path: str) -> Callable[[Exchange], None] | None:
        """Who opens such a request; None: the app answers it."""
        if path == CHAT:
            return self._chat if method == "POST" else None
        if path == COMPLETIONS:
            return self._completion if method == "POST" else None
        if method == "OPTIONS" or path == MODELS or path.startswith(ONE_MODEL):
            return None
        if (path.startswith("/v1/") and is_plain(path)) or (path in FORWARDED and method == "POST"):
            return self._forward
        return None

    def _chat(self, exchange: Exchange) -> None:
        self._generation(exchange, chat=True)

    def _completion(self, exchange: Exchange) -> None:
        self._generation(exchange, chat=False)

    def _generation(self, exchange: Exchange, *, chat: bool) -> None:
        admitted = self._admitted(exchange)
        routing = Routing(self._router, exchange, admitted, chat, self._router.now_s())
        exchange.expect(routing.serve, self._router.config.max_body_bytes)

    def _forward(self, exchange: Exchange) -> None:
        forwarding = Forwarding(self._router, exchange, self._admitted(exchange))
        exchange.expect(forwarding.serve, self._router.config.max_body_bytes)

    def _admitted(self, exchange: Exchange) -> Admitted:
        router, scope = self._router, exchange.scope
        headers, client = scope["headers"], scope["client"]
        if self._cors:
            self._allow_origin(exchange, headers)
        host = client[0] if client else None
        try:
            if router.draining:
                raise draining()
            admitted = router.admission.admit(
                headers,
                scope["path"],
                host,
                router.now_s(),
                method=scope["method"],
                http_version=scope["http_version"],
            )
        except ApiError as error:
            router.turned_away(scope, error)
            raise
        exchange.extra += id_line(admitted)
        router.open_requests += 1
        return admitted

    def _allow_origin(self, exchange: Exchange, headers: list[tuple[bytes, bytes]]) -> None:
        origin = value_of(headers, b"origin")
        if origin is not None and (origin in self._cors or b"*" in self._cors):
            exchange.extra = b"access-control-allow-origin: %b\r\nvary: origin\r\n" % origin
