"""Opens an exchange for each request of a gateway, by the router's own table of routes and its own admission."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.types import Message, Receive, Scope

from api.errors import ApiError
from api.http.connection import Limits
from api.http.path import parse_target, raw_path
from api.http.routes import Role, RouteTable
from router.http.front import Openings
from router.http.one_answer import scope_with
from router.http.picker.exchange import PickedExchange
from router.http.picker.stream import Mode, RequestHeaders
from router.members.upstream import Header
from router.proxy.exchange import Exchange
from router.proxy.headers import value_of
from router.workers.colleagues import Answer

log = logging.getLogger(__name__)

MAX_SHOWN = 256  # characters of a method, or of a target that is none, in the access log


@dataclass(eq=False)
class Gateway:
    """`_openings`: of the transport ByGateway. `_app_answer`: for what the app answers to clients below /v1."""

    _table: RouteTable
    _openings: Openings
    _app_answer: Callable[[Scope, Receive], Awaitable[Answer]]
    limits: Limits
    streams: int = 0  # the open ones

    def open(self, asked: RequestHeaders) -> PickedExchange:
        """Begin a request; its outcome is there at once if it is refused by its headers."""
        scope = scope_of(asked)
        try:
            if self.streams > self.limits.connections:
                # An answer refuses it: if the stream failed instead, the gateway might let the request pass.
                message = f"{self.streams:,} requests of gateways are open; try again, or raise max_connections"
                again = {"Retry-After": "1"}
                raise ApiError(503, message, "service_unavailable", code="too_many_connections", headers=again)
            # In other modes a request goes on before its body has come.
            if not (asked.end or asked.request_mode in (Mode.BUFFERED, Mode.FULL_DUPLEX_STREAMED)):
                name = next((mode.name for mode in Mode if mode == asked.request_mode), asked.request_mode)
                why = f"the gateway's request_body_mode is {name}, and a request is placed by its body"
                fix = "set FULL_DUPLEX_STREAMED or BUFFERED"
                raise ApiError(500, f"{why}; {fix}", "server_error", code="body_not_sent")
            target = parse_target(scope["raw_path"])
            found = self._table.find(scope["method"], target.path)
            # The usual spelling of its path.
            scope["path"], scope["raw_path"], scope["query_string"] = found.text, raw_path(target.path), target.query
            opens = None if found.route is None else self._openings.by_route.get(found.route)
            if opens is None:
                if found.route is None or found.who is not Role.CLIENT or not found.text.startswith("/v1/"):
                    raise found.refusal(scope["method"])
                opens = self._answer
        except ApiError as error:
            opens = self._openings.refused(error)
        watched = asked.response_mode != Mode.NONE
        exchange = PickedExchange(scope, opens, asked=asked, more_body=not asked.end, is_watched=watched)
        exchange.guard(exchange.begin)
        return exchange

    def _answer(self, exchange: Exchange) -> None:
        """Answer in place of a replica, which knows only its own models."""

        async def no_body() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def ask_app() -> None:
            try:
                answer = await self._app_answer(exchange.scope, no_body)
            except Exception:  # it ends this request alone
                log.exception("A request of a gateway failed")
                exchange.aside = None
                exchange.fail()
                return
            exchange.aside = None
            kept = [(name, value) for name, value in answer.headers if name != b"content-length"]
            exchange.answer(answer.status, b"".join(b"%b: %b\r\n" % header for header in kept), answer.body)

        exchange.aside = asyncio.get_running_loop().create_task(ask_app())


def scope_of(asked: RequestHeaders) -> Scope:
    """The request as ASGI describes it. Its client is never local: a gateway stands between."""
    pseudo = {name: value for name, value in asked.headers if name.startswith(b":")}
    headers: list[Header] = [header for header in asked.headers if not header[0].startswith(b":")]
    target = pseudo.get(b":path", b"")
    forwarded = value_of(headers, b"x-forwarded-for") or b""  # the client as the gateway names it, for the access log
    client = forwarded.rpartition(b",")[2].strip()[:MAX_SHOWN].decode("latin-1")
    return scope_with(
        pseudo.get(b":method", b"")[:MAX_SHOWN].decode("latin-1"),
        target[:MAX_SHOWN].decode("latin-1"),
        target,
        scheme=pseudo.get(b":scheme", b"http").decode("latin-1"),
        headers=headers,
        client=(client, 0),
    )
