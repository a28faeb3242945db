"""The controller's HTTP: the registry for routers, the view for people, and what changes a fleet.

What changes something, or shows what replicas print, is for holders of the fleet's key: see the table of routes.
"""

import asyncio
import hmac
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from msgspec import Struct
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Scope

from api.errors import ApiError, invalid, unauthorized
from api.http.prometheus import CONTENT_TYPE
from api.http.responses import error_response, json_response
from api.http.routes import Gate, Role, Route, RouteMatch, RouteTable, served
from api.http.server import connection_limits, http_server
from api.process.tasks import check as check_tasks
from api.process.tasks import first
from api.reading import read
from fleet.control.controller import Controller
from fleet.control.hosts import HostGone, HostLost
from fleet.control.reconcile import UnknownName
from fleet.control.view import metrics_text, model_view, view
from fleet.plan import MAX_REPLICAS, FleetPlan, check

DONE = {"status": "ok"}
USUAL_LINES = 100


class ScaleRequest(Struct, forbid_unknown_fields=True):
    model: str
    replicas: int


class RestartRequest(Struct, forbid_unknown_fields=True):
    model: str
    surge: int = 0


class DrainRequest(Struct, forbid_unknown_fields=True):
    replica: str
    drain: bool = True


class DrainNodeRequest(Struct, forbid_unknown_fields=True):
    node: str
    drain: bool = True


class KeyCheck:
    def __init__(self, key: str) -> None:
        assert key, "with an empty key everybody would have it"
        self._expected = f"Bearer {key}".encode()

    def sent(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)

    def admit(self, scope: Scope, asked: RouteMatch) -> None:
        if asked.who is not Role.ANYONE and not self.sent(scope):
            raise unauthorized()


class Endpoints:
    def __init__(self, controller: Controller, holders: KeyCheck) -> None:
        self._controller = controller
        self._holders = holders

    # ---- state

    async def members(self, request: Request) -> Response:
        after = request.query_params.get("after")
        try:
            wait_s = float(request.query_params.get("wait", "0"))
            answer = await self._controller.registry.answer(None if after is None else int(after), wait_s)
        except ValueError as error:
            raise invalid("wait is a number of seconds, and after a version: a whole number") from error
        if answer is None:
            raise not_known()
        return Response(answer, media_type="application/json")

    async def health(self, _: Request) -> Response:
        return json_response(DONE)

    async def fleet(self, request: Request) -> Response:
        return json_response(view(self._controller, logs=self._holders.sent(request.scope)))

    async def metrics(self, _: Request) -> Response:
        return Response(metrics_text(self._controller), media_type=CONTENT_TYPE)

    async def log(self, request: Request) -> Response:
        name, lines = request.query_params.get("replica", ""), request.query_params.get("lines", str(USUAL_LINES))
        if not lines.isdecimal():
            raise invalid(f"lines is {lines!r}; make it a whole number")
        if (host := self._controller.host_of.get(name)) is None:
            self._controller.reconciler.replica(name)  # UnknownName
            raise ApiError(503, f"{name} has no log: it has not started yet", code="host_lost")
        try:
            return Response(await host.log(int(lines)), media_type="text/plain; charset=utf-8")
        except (HostLost, HostGone) as error:
            raise ApiError(503, f"its host does not answer: {error}", code="host_lost") from error

    # ---- what should be

    async def want(self, request: Request) -> Response:
        plan = await read_body(request, FleetPlan)
        try:
            check(plan)
        except ValueError as error:
            raise invalid(str(error)) from error
        self._controller.want(plan)
        return json_response(view(self._controller, logs=True))

    async def scale(self, request: Request) -> Response:
        wish = await read_body(request, ScaleRequest)
        plan = self._controller.reconciler.plan.model(wish.model)
        bounds = plan and plan.autoscale
        if bounds and not bounds.min <= wish.replicas <= bounds.max:
            raise invalid(f"replicas is {wish.replicas}; {wish.model} scales from {bounds.min} to {bounds.max}")
        if not 0 <= wish.replicas <= MAX_REPLICAS:
            raise invalid(f"replicas is {wish.replicas}; make it a number from 0 to {MAX_REPLICAS}")
        self._controller.reconciler.scale(wish.model, wish.replicas)
        return self._changed(wish.model)

    async def restart(self, request: Request) -> Response:
        wish = await read_body(request, RestartRequest)
        if wish.surge not in (0, 1):
            raise invalid(f"surge is {wish.surge}; make it 0 or 1")
        self._controller.reconciler.restart(wish.model, wish.surge)
        return self._changed(wish.model)

    def _changed(self, model: str) -> Response:
        self._controller.look()
        return json_response(model_view(self._controller, model))

    async def drain(self, request: Request) -> Response:
        wish = await read_body(request, DrainRequest)
        self._controller.reconciler.drain(wish.replica, wish.drain)
        self._controller.look()
        return json_response(DONE)

    async def drain_node(self, request: Request) -> Response:
        wish = await read_body(request, DrainNodeRequest)
        if not self._controller.registry.known:
            raise not_known()  # a controller that has just begun does not know what runs where
        names = self._controller.reconciler.drain_node(wish.node, wish.drain)
        self._controller.look()
        return json_response({"replicas": names})

    async def end(self, _: Request) -> Response:
        self._controller.reconciler.end()
        self._controller.look()
        return json_response({"status": "ending"}, 202)


GET, POST, PUT = ("GET", "HEAD"), ("POST",), ("PUT",)
ANYONE, HOLDER = Role.ANYONE, Role.ADMINISTRATOR

ROUTES = (
    Route(GET, "/members", ANYONE, Endpoints.members),
    Route(GET, "/health", ANYONE, Endpoints.health),
    Route(GET, "/metrics", ANYONE, Endpoints.metrics),
    Route(GET, "/fleet", ANYONE, Endpoints.fleet),
    Route(PUT, "/fleet", HOLDER, Endpoints.want),
    Route(GET, "/replicas/log", HOLDER, Endpoints.log),
    Route(POST, "/replicas/drain", HOLDER, Endpoints.drain),
    Route(POST, "/nodes/drain", HOLDER, Endpoints.drain_node),
    Route(POST, "/models/scale", HOLDER, Endpoints.scale),
    Route(POST, "/models/restart", HOLDER, Endpoints.restart),
    Route(POST, "/end", HOLDER, Endpoints.end),
)
TABLE = RouteTable(ROUTES)


def build_app(controller: Controller, key: str) -> Starlette:
    """`key` is needed to change the fleet or read its logs."""
    holders = KeyCheck(key)
    endpoints = Endpoints(controller, holders)
    app = Starlette(
        routes=served(ROUTES, endpoints),
        exception_handlers={
            ApiError: _answering(error_response),
            UnknownName: _answering(lambda error: error_response(ApiError(404, str(error), code="not_found"))),
            HTTPException: _answering(lambda error: error_response(ApiError(error.status_code, str(error.detail)))),
            ClientDisconnect: _answering(lambda _: Response(status_code=400)),
        },
        middleware=[Middleware(Gate, table=TABLE, admit=holders.admit)],
    )
    app.router.redirect_slashes = False
    return app


def not_known() -> ApiError:
    return ApiError(503, "the replicas are still unknown", code="not_known", headers={"Retry-After": "1"})


def _answering(make: Callable[[Any], Response]) -> Callable[[Request, Any], Awaitable[Response]]:
    async def answer(_: Request, error: Any) -> Response:
        return make(error)

    return answer


MAX_BYTES = 4 * 1024 * 1024


async def read_body(request: Request, kind: Any) -> Any:
    """Read and decode a small body; refuse it as soon as it is too long."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BYTES:
            raise ApiError(413, f"the body is longer than {MAX_BYTES} bytes", code="body_too_large")
    return read(bytes(body), kind)


class Serving:
    """A served controller: `start` it in a running loop; `ended` returns once the fleet has ended."""

    def __init__(self, controller: Controller, listener: socket.socket, key: str) -> None:
        self.controller = controller
        self._listener = listener
        self._server = http_server(build_app(controller, key), connection_limits())
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._server.serve(sockets=[self._listener])),
            asyncio.create_task(self.controller.run()),
        ]
        await first(asyncio.create_task(self._server.listening.wait()), beside=self._tasks)
        check_tasks(self._tasks)

    async def ended(self) -> None:
        """Raise the error of a task that has failed."""
        await first(asyncio.create_task(self.controller.ended.wait()), beside=self._tasks)
        check_tasks(self._tasks)

    async def close(self) -> None:
        self.controller.registry.close()
        self._server.end()
        serving, running = self._tasks
        await asyncio.gather(serving, return_exceptions=True)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        self._listener.close()
