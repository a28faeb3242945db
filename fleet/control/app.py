"""The controller's HTTP: the registry for routers, the view for people, and what changes a fleet.

A new route that changes something goes into CHANGES too, or anybody could ask for it.
"""

import hmac
import os
from importlib.metadata import version
from typing import Any

import msgspec
from fastapi import FastAPI
from msgspec import Struct
from prometheus_client import CONTENT_TYPE_LATEST as CONTENT_TYPE
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from api.errors import ApiError, invalid, not_found, unauthorized
from api.http.answers import error_response, json_response
from fleet.control.controller import Controller
from fleet.control.hosts import HostGone, HostLost
from fleet.control.metrics import metrics_text
from fleet.control.reconcile import UnknownName
from fleet.control.view import model_view, view
from fleet.plan import FleetPlan

CHANGES = frozenset({"/models/scale", "/models/restart", "/replicas/drain", "/replicas/log", "/end"})
DONE = {"status": "ok"}
MOST_BYTES = 4 * 1024 * 1024
MOST_REPLICAS = 10_000
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


class Endpoints:
    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    # ---- what is so

    async def members(self, request: Request) -> Response:
        after = request.query_params.get("after")
        try:
            wait_s = float(request.query_params.get("wait", "0"))
            answer = await self._controller.registry.answer(None if after is None else int(after), wait_s)
        except ValueError as error:
            raise invalid("wait is a number of seconds, and after a version: a whole number") from error
        if answer is None:
            raise ApiError(503, "the replicas are not known yet", code="not_known", headers={"Retry-After": "1"})
        return Response(answer, media_type="application/json")

    async def health(self) -> Response:
        return json_response(DONE)

    async def fleet(self) -> Response:
        return json_response({"version": version("warmroute"), "pid": os.getpid(), **view(self._controller)})

    async def metrics(self) -> Response:
        return Response(metrics_text(self._controller), media_type=CONTENT_TYPE)

    async def log(self, request: Request) -> Response:
        name, lines = request.query_params.get("replica", ""), request.query_params.get("lines", str(USUAL_LINES))
        if not lines.isdecimal():
            raise invalid(f"lines is {lines!r}; make it a whole number")
        host = self._controller.host(name)
        if host is None:
            names = ", ".join(self._controller.reconciler.replicas) or "none"
            raise ApiError(404, f"there is no replica {name!r}; there are {names}", code="not_found")
        try:
            return Response(await host.log(int(lines)), media_type="text/plain; charset=utf-8")
        except (HostLost, HostGone) as error:
            raise ApiError(503, f"its host does not answer: {error}", code="host_lost") from error

    # ---- what should be

    async def want(self, request: Request) -> Response:
        plan = await _body(request, FleetPlan)
        names = [model.name for model in plan.models]
        if len(set(names)) < len(names):
            raise invalid("two models have the same name; give each one of its own")
        self._controller.want(plan)
        return json_response(view(self._controller))

    async def scale(self, request: Request) -> Response:
        wish = await _body(request, ScaleRequest)
        plan = self._controller.reconciler.plan.model(wish.model)
        bounds = plan and plan.autoscale
        if bounds and not bounds.min <= wish.replicas <= bounds.max:
            raise invalid(f"replicas is {wish.replicas}; {wish.model} scales from {bounds.min} to {bounds.max}")
        if not 0 <= wish.replicas <= MOST_REPLICAS:
            raise invalid(f"replicas is {wish.replicas}; make it a number from 0 to {MOST_REPLICAS}")
        self._controller.reconciler.scale(wish.model, wish.replicas)
        return self._changed(wish.model)

    async def restart(self, request: Request) -> Response:
        wish = await _body(request, RestartRequest)
        if wish.surge not in (0, 1):
            raise invalid(f"surge is {wish.surge}; make it 0 or 1")
        self._controller.reconciler.restart(wish.model, wish.surge)
        return self._changed(wish.model)

    def _changed(self, model: str) -> Response:
        self._controller.look()
        return json_response(model_view(self._controller, model))

    async def drain(self, request: Request) -> Response:
        wish = await _body(request, DrainRequest)
        self._controller.reconciler.drain(wish.replica, wish.drain)
        self._controller.look()
        return json_response(DONE)

    async def end(self) -> Response:
        self._controller.reconciler.end()
        self._controller.look()
        return json_response({"status": "ending"}, 202)


async def _body(request: Request, kind: Any) -> Any:
    """Small, so it is read at once; a declared length is all that a client may send."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise ApiError(413, f"the body is longer than {MOST_BYTES} bytes", code="body_too_large")
    try:
        return msgspec.json.decode(bytes(body), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise invalid(f"the body cannot be used: {error}") from error


class Guard:
    """Lets only those change a fleet who have its key, or where it has none who are on its machine."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app = app
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (self._app if refusal is None else error_response(refusal))(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        if scope["path"] not in CHANGES and scope["method"] in ("GET", "HEAD"):
            return None
        if self._key is not None:
            given = dict(scope["headers"]).get(b"authorization", b"")
            return None if hmac.compare_digest(given, f"Bearer {self._key}".encode()) else unauthorized()
        client = scope["client"]
        if client is not None and (client[0] == "::1" or client[0].startswith("127.")):
            return None
        message = "only clients on the controller's own machine may ask for this; give the fleet a WARMROUTE_FLEET_KEY"
        return ApiError(403, message, code="fleet_key_required")


def build_app(controller: Controller, key: str | None) -> FastAPI:
    app = FastAPI(title="warmroute fleet", version=version("warmroute"), docs_url=None, redoc_url=None)
    endpoints = Endpoints(controller)
    for method, path, endpoint in (
        ("GET", "/members", endpoints.members),
        ("GET", "/health", endpoints.health),
        ("GET", "/fleet", endpoints.fleet),
        ("PUT", "/fleet", endpoints.want),
        ("GET", "/metrics", endpoints.metrics),
        ("GET", "/replicas/log", endpoints.log),
        ("POST", "/replicas/drain", endpoints.drain),
        ("POST", "/models/scale", endpoints.scale),
        ("POST", "/models/restart", endpoints.restart),
        ("POST", "/end", endpoints.end),
    ):
        app.add_api_route(path, endpoint, methods=[method])
    app.add_exception_handler(ApiError, _answer_api_error)
    app.add_exception_handler(UnknownName, _answer_unknown_name)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_middleware(Guard, key=key)
    return app


async def _answer_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _answer_unknown_name(_: Request, error: Exception) -> Response:
    return error_response(ApiError(404, str(error), code="not_found"))


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return error_response(not_found(request.url.path))
    return error_response(ApiError(error.status_code, str(error.detail)))
