"""Tables of routes, with the role that each route requires. A path is looked up once, and only that row can answer."""

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

from msgspec import Struct
from starlette import routing
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from api.errors import ApiError, internal, invalid, method_not_allowed, not_found, quoted
from api.http.path import Segments, parse_path
from api.http.responses import error_response

log = logging.getLogger(__name__)

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]


class Role(IntEnum):
    """Callers of a route: each role has fewer members than the one before."""

    ANYONE = 0
    CLIENT = 1
    READER = 2  # any key; an administrator sees more
    ADMINISTRATOR = 3


class Route(Struct, frozen=True, eq=False):
    """A row of the table. `{name}` matches one segment of a path, `{name:path}` at the end matches the rest."""

    methods: tuple[str, ...]
    template: str
    who: Role
    endpoint: Any  # a method of the class that answers, or what another handler has to know
    encoded_slashes: bool = False  # whether its parameter may have slashes that were written %2F
    in_document: bool = True


class RouteMatch(NamedTuple):
    """The row that matches a request. Without a route, the request is refused after the caller is admitted."""

    route: Route | None
    who: Role
    params: Mapping[str, str]
    text: str  # the path as people read it
    allowed: tuple[str, ...] = ()  # the methods that are there, if this one is not

    def refusal(self, method: str) -> ApiError:
        return method_not_allowed(method, self.text, self.allowed) if self.allowed else not_found(self.text)


class PathRoutes:
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
        """The parameters of a path; None if it does not match."""
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

    def asked(self, method: str, path: Segments, params: Mapping[str, str]) -> RouteMatch:
        route, text = self._routes.get(method), text_of(path)
        if route is None:
            return RouteMatch(None, self._strictest, params, text, self.methods)
        return RouteMatch(route, route.who, params, text)


class RouteTable:
    """Routes by template. A fixed template wins, then the first that matches."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(routes)
        by_template: dict[str, list[Route]] = {}
        for route in self.routes:
            by_template.setdefault(route.template, []).append(route)
        self.places = [PathRoutes(found) for found in by_template.values()]
        fixed = [place for place in self.places if place.is_fixed]
        self._fixed = {tuple(place.parts): place for place in fixed}
        self._others = [place for place in self.places if not place.is_fixed]
        # The usual spellings are found without parsing: nearly every request has one of these.
        self.usual = {
            place.template.encode(): {method: place.asked(method, tuple(place.parts), {}) for method in place.methods}
            for place in fixed
        }

    def find(self, method: str, path: Segments) -> RouteMatch:
        """The row for a path; raise ApiError 400 for an encoded slash where no name may have one."""
        place, params = self._fixed.get(path), dict[str, str]()
        for other in () if place is not None else self._others:
            if (found := other.params(path)) is not None:
                place, params = other, found
                break
        if any("/" in segment for segment in path) and not (place and place.encoded_slashes):
            shown = quoted("/" + "/".join(segment.replace("/", "%2F") for segment in path))
            raise invalid(f"{shown} has an encoded slash outside of a name; write '/'", code="invalid_path")
        if place is None:
            return RouteMatch(None, Role.CLIENT, {}, text_of(path))
        return place.asked(method, path, params)

    def asked(self, scope: Scope) -> RouteMatch:
        raw: bytes = scope["raw_path"]
        return self.usual.get(raw, {}).get(scope["method"]) or self.find(scope["method"], parse_path(raw))


def text_of(path: Segments) -> str:
    return "/" + "/".join(path)


def check_preflight(scope: Scope, asked: RouteMatch, advice: str) -> None:
    """Raise ApiError 405 with advice if a browser asks whether a page may use this route, which has no key to show."""
    if scope["method"] != "OPTIONS" or not asked.allowed:
        return
    headers = dict(scope["headers"])
    if b"origin" in headers and b"access-control-request-method" in headers:
        origin = quoted(headers[b"origin"].decode("latin-1"))
        refusal = method_not_allowed("OPTIONS", asked.text, asked.allowed)
        message = f"pages of {origin} may not use {quoted(asked.text)}; {advice}"
        raise ApiError(405, message, code="origin_not_allowed", headers=refusal.headers)


class Gate:
    """Admits requests to an app: `admit` raises ApiError if the caller may not use the route.

    `advice` is for people whose pages may not ask this server (`check_preflight`).
    """

    def __init__(
        self, app: ASGIApp, table: RouteTable, admit: Callable[[Scope, RouteMatch], None], advice: str = ""
    ) -> None:
        self._app = app
        self._table = table
        self._admit = admit
        self._advice = advice

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                asked = self._table.asked(scope)
                if self._advice:
                    check_preflight(scope, asked, self._advice)
                self._admit(scope, asked)
                mark_admitted(scope, asked)
            except ApiError as error:
                await error_response(error, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)


def mark_admitted(scope: Scope, asked: RouteMatch) -> None:
    """Record that this route was admitted; raise ApiError 404 or 405 if there is no route."""
    if asked.route is None:
        raise asked.refusal(scope["method"])
    scope.setdefault("state", {})["asked"] = asked


def served(routes: Iterable[Route], endpoints: Any) -> list[routing.Route]:
    """Routes of an app, for rows whose endpoints are methods of `endpoints`."""
    return [
        route_for(route.methods, route.template, guarded(route, route.endpoint.__get__(endpoints))) for route in routes
    ]


def route_for(methods: Iterable[str], template: str, endpoint: Endpoint) -> routing.Route:
    """Starlette by itself would answer HEAD wherever it answers GET."""
    made = routing.Route(template, endpoint)
    made.methods = set(methods)
    return made


def guarded(route: Route, answer: Endpoint) -> Endpoint:
    """Wrap an endpoint so that it serves only requests that were admitted through its own row."""

    async def endpoint(request: Request) -> Response:
        asked: RouteMatch | None = request.scope.get("state", {}).get("asked")
        if asked is None or asked.route is not route:
            log.error("%s %r reached %s by no route; refused", request.method, request.scope["path"], route.template)
            raise internal()
        request.scope["path_params"] = dict(asked.params)
        return await answer(request)

    return endpoint
