"""Tables of routes: for each route, who may ask. A path is looked up once, and only what was found can answer."""

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

from fastapi import FastAPI
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from api.errors import ApiError, internal, invalid, method_not_allowed, not_found, quoted
from api.http.answers import error_response
from api.http.path import Segments, parse_path

log = logging.getLogger(__name__)

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]


class Who(IntEnum):
    """Later ones are fewer."""

    ANYONE = 0
    CLIENT = 1
    READER = 2  # whoever has a key; an administrator sees more
    ADMINISTRATOR = 3


class Route(Struct, frozen=True, eq=False, kw_only=True):
    """`{name}` in a template is one part of a path, `{name:path}` at its end is all that is left of it."""

    methods: tuple[str, ...]
    template: str
    who: Who
    endpoint: Callable[..., Any]  # a method of the class that answers
    encoded_slashes: bool = False  # whether its parameter may have slashes that were written %2F
    in_document: bool = True


class Asked(NamedTuple):
    """The row that a request asks for. Without a route it is refused, after the caller is known to be let in."""

    route: Route | None
    who: Who
    params: Mapping[str, str]
    text: str  # the path as people read it
    allowed: tuple[str, ...] = ()  # the methods that are there, if this one is not

    def refusal(self, method: str) -> ApiError:
        return method_not_allowed(method, self.text, self.allowed) if self.allowed else not_found(self.text)


class Place:
    """The routes of one template."""

    def __init__(self, routes: list[Route]) -> None:
        self.template = routes[0].template
        self.parts = self.template[1:].split("/") if self.template != "/" else []
        self.encoded_slashes = all(route.encoded_slashes for route in routes)
        self._routes = {method: route for route in routes for method in route.methods}
        self._strictest = max(route.who for route in routes)
        assert len(self._routes) == sum(len(route.methods) for route in routes), f"{self.template} is there twice"

    @property
    def is_fixed(self) -> bool:
        return "{" not in self.template

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(sorted(self._routes))

    def params(self, path: Segments) -> dict[str, str] | None:
        """None: it is another path."""
        found: dict[str, str] = {}
        for i, part in enumerate(self.parts):
            if i >= len(path):
                return None
            if part.endswith(":path}"):
                found[part[1:-6]] = "/".join(path[i:])
                return found
            if part.startswith("{"):
                found[part[1:-1]] = path[i]
            elif part != path[i]:
                return None
        return found if len(path) == len(self.parts) else None

    def asked(self, method: str, path: Segments, params: Mapping[str, str]) -> Asked:
        route, text = self._routes.get(method), text_of(path)
        if route is None:
            return Asked(None, self._strictest, params, text, self.methods)
        return Asked(route, route.who, params, text)


class Table:
    """Routes by template. A fixed template goes first, then the first that fits."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(routes)
        by_template: dict[str, list[Route]] = {}
        for route in self.routes:
            by_template.setdefault(route.template, []).append(route)
        self.places = [Place(found) for found in by_template.values()]
        fixed = [place for place in self.places if place.is_fixed]
        self._fixed = {tuple(place.parts): place for place in fixed}
        self._others = [place for place in self.places if not place.is_fixed]
        # By the usual spelling, found without parsing: nearly every request has one of these.
        self.usual = {
            place.template.encode(): {method: place.asked(method, tuple(place.parts), {}) for method in place.methods}
            for place in fixed
        }

    def find(self, method: str, path: Segments) -> Asked:
        """ApiError 400 where a slash is encoded in a path that has none in a name."""
        place, params = self._place(path)
        if any("/" in segment for segment in path) and not (place and place.encoded_slashes):
            shown = quoted("/" + "/".join(segment.replace("/", "%2F") for segment in path))
            raise invalid(f"{shown} has an encoded slash outside of a name; write '/'", code="invalid_path")
        if place is None:
            return Asked(None, Who.CLIENT, {}, text_of(path))
        return place.asked(method, path, params)

    def asked(self, scope: Scope) -> Asked:
        raw: bytes = scope["raw_path"]
        return self.usual.get(raw, {}).get(scope["method"]) or self.find(scope["method"], parse_path(raw))

    def _place(self, path: Segments) -> tuple[Place | None, dict[str, str]]:
        if (fixed := self._fixed.get(path)) is not None:
            return fixed, {}
        for place in self._others:
            if (params := place.params(path)) is not None:
                return place, params
        return None, {}


def text_of(path: Segments) -> str:
    return "/" + "/".join(path)


class Gate:
    """In front of an app, the one way to it: `admit` raises ApiError unless whoever asks may."""

    def __init__(self, app: ASGIApp, table: Table, admit: Callable[[Scope, Asked], None]) -> None:
        self._app = app
        self._table = table
        self._admit = admit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                asked = self._table.asked(scope)
                self._admit(scope, asked)
                let_in(scope, asked)
            except ApiError as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def let_in(scope: Scope, asked: Asked) -> None:
    """Remember that this route's row was passed; ApiError 404 or 405 where there is none."""
    if asked.route is None:
        raise asked.refusal(scope["method"])
    scope.setdefault("state", {})["asked"] = asked


def add_routes(app: FastAPI, routes: Iterable[Route], endpoints: Any, operation: Callable[[str, Any], Any]) -> None:
    """Add the routes that methods of `endpoints` answer; `operation` says what OpenAPI has of a method of one."""
    for route in routes:
        for method in route.methods:
            app.add_api_route(
                route.template,
                guarded(route, route.endpoint.__get__(endpoints)),
                methods=[method],
                openapi_extra=operation(method, route),
                include_in_schema=route.in_document,
            )


def guarded(route: Route, answer: Endpoint) -> Endpoint:
    """An endpoint that answers only what was let in through its own row, whichever way a request has come to it."""

    async def endpoint(request: Request) -> Response:
        asked: Asked | None = request.scope.get("state", {}).get("asked")
        if asked is None or asked.route is not route:
            log.error("%s %r came to %s past its row; refused", request.method, request.scope["path"], route.template)
            raise internal()
        request.scope["path_params"] = dict(asked.params)
        return await answer(request)

    endpoint.__name__ = answer.__name__  # as the document has it
    return endpoint
