"""The API around the generation routes: models, health, metrics, replicas, decisions and their reasons."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from importlib.metadata import version
from itertools import islice
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import ApiError, draining, internal, invalid, method_not_allowed, not_found, quoted
from api.http.answers import error_response, json_response
from api.responses import Model, ModelList
from router.access_log import line_of
from router.admission import is_open
from router.core import Router
from router.dashboard import files
from router.dashboard.dashboard import Dashboard
from router.dashboard.rows import query_of
from router.exchange import too_large
from router.http.document import DIRECT, control, direct, document
from router.http.explaining import explained
from router.http.opening import POST_ONLY
from router.metrics import CONTENT_TYPE, metrics_text
from router.sharing import shared
from router.spec import BadSpec, spec_of
from router.status import index_status, not_ready, replica_status
from router.upkeep import Upkeep

DONE = {"status": "ok"}
MAX_SMALL_BODY = 1024 * 1024
MOST_NAMES = 10  # of replicas, in an error


class Endpoints:
    def __init__(self, router: Router, upkeep: Upkeep, dashboard: Dashboard) -> None:
        self._router = router
        self._upkeep = upkeep
        self._dashboard = dashboard
        self._sharing = asyncio.Lock()  # a tree is work for a thread: one at a time

    # ---- models

    async def models(self) -> Response:
        return json_response(ModelList(data=[self._model(name) for name in self._router.members.models]))

    async def model_named(self, request: Request) -> Response:
        name = request.path_params["model"]
        self._router.members.model(name)
        return json_response(self._model(name))

    def _model(self, name: str) -> Model:
        lengths = [one.max_model_len for one in self._router.members.model(name).candidates if one.max_model_len]
        longest = max(lengths, default=None)
        return Model(id=name, created=self._router.started, max_model_len=msgspec.UNSET if longest is None else longest)

    async def direct(self) -> Response:
        raise AssertionError("such a request goes past the app; the route is here for the document, and for status 405")

    # ---- health

    async def health(self) -> Response:
        return json_response(DONE)

    async def ready(self) -> Response:
        if self._router.draining:
            raise draining()
        why = "the router is about to end" if self._router.leaving else not_ready(self._router)
        if why is not None:
            raise ApiError(503, why, "service_unavailable", code="not_ready", headers={"Retry-After": "1"})
        self._router.index_awaited_until_s = 0.0  # who was told once sends requests
        return json_response(DONE)

    async def metrics(self) -> Response:
        return Response(await metrics_text(self._router), media_type=CONTENT_TYPE)

    async def version(self) -> Response:
        return json_response({"version": version("warmroute")})

    # ---- replicas

    async def replicas(self) -> Response:
        return json_response({"replicas": [replica_status(self._router, member) for member in self._router.members]})

    async def add_replica(self, request: Request) -> Response:
        try:
            fields = msgspec.json.decode(await body_of(request, MAX_SMALL_BODY), type=dict[str, Any])
            spec = spec_of(fields)
            if spec.api_key_env or spec.curve_secret:  # whoever may ask for this need not be who may read these
                raise invalid("api_key_env and the files of CURVE keys can be named only where the router is started")
            self._upkeep.add(spec)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise invalid(f"the body is no JSON object that describes a replica: {error}") from error
        except BadSpec as error:
            raise invalid(str(error)) from error
        return json_response(replica_status(self._router, self._router.members.by_name[spec.name]), 201)

    async def remove_replica(self, request: Request) -> Response:
        member = self._member(request)
        try:
            self._upkeep.remove(member.name)
        except BadSpec as error:
            raise ApiError(409, str(error), code="named_by_discovery") from error
        return json_response(DONE)

    async def drain(self, request: Request) -> Response:
        member = self._member(request)
        member.health.drain()
        return json_response(replica_status(self._router, member))

    async def undrain(self, request: Request) -> Response:
        member = self._member(request)
        member.health.undrain()
        return json_response(replica_status(self._router, member))

    async def resync(self, request: Request) -> Response:
        member = self._member(request)
        self._router.feeds.resync(member.name, "somebody asked for it")
        return json_response(replica_status(self._router, member))

    def _member(self, request: Request) -> Any:
        name = request.path_params["name"]
        member = self._router.members.by_name.get(name)
        if member is None:
            known = _some(self._router.members.by_name)
            message = f"there is no replica named {name[:100]!r}; there are: {known}"
            raise ApiError(404, message, code="replica_not_found")
        return member

    # ---- why

    async def explain(self, request: Request) -> Response:
        body = await body_of(request, self._router.config.max_body_bytes)
        return json_response(await explained(self._router, body, request.state.admitted))

    async def decisions(self, request: Request) -> Response:
        remembered = list(self._router.decisions)[-limit_of(request, 100) :][::-1]
        return json_response({"decisions": [one.record() for one in remembered]})

    async def decision(self, request: Request) -> Response:
        wanted = request.path_params["request_id"]
        found = next((one for one in reversed(self._router.decisions) if one.request_id == wanted), None)
        if found is None:
            message = f"no decision about a request {quoted(wanted)} is remembered; see /decisions, and --decisions"
            raise ApiError(404, message, code="decision_not_found")
        return json_response(found.record())

    async def prefixes(self, request: Request) -> Response:
        limit = limit_of(request, 20)
        async with self._sharing:
            return json_response(await shared(self._router, limit))

    async def debug_index(self) -> Response:
        return json_response(index_status(self._router))

    # ---- the dashboard

    async def dashboard_index(self, request: Request) -> Response:
        return _file(request, files.INDEX)

    async def dashboard_file(self, request: Request) -> Response:
        path = request.path_params["path"]
        return _file(request, path) if path else RedirectResponse("../dashboard", 308)

    async def dashboard_feed(self, request: Request) -> Response:
        return self._dashboard.feed(query_of(request.query_params), request.state.admitted)

    async def dashboard_replica(self, request: Request) -> Response:
        member, prefixes = self._member(request), None
        if request.state.admitted.admin:
            prefixes = await self._dashboard.prefixes(member)
            member = self._member(request)  # it may have left, or be another one by now
        return json_response(self._dashboard.replica(member, prefixes))


class Guard:
    """The same door as that of the generation routes."""

    def __init__(self, app: ASGIApp, router: Router) -> None:
        self._app = app
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        router, client = self._router, scope["client"]
        host = client[0] if client else None
        try:
            admitted = router.admission.admit(
                scope["headers"],
                scope["path"],
                host,
                router.now_s(),
                method=scope["method"],
                http_version=scope["http_version"],
            )
        except ApiError as error:
            router.turned_away(scope, error)
            await error_response(error)(scope, receive, send)
            return
        scope["state"]["admitted"] = admitted
        status, begun_s, sent = 0, router.now_s(), 0

        async def count(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", admitted.request_id.encode())]
            else:
                sent += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, count)
        finally:
            router.admission.release(admitted)
            if router.on_answer is not None and not is_open(scope["path"]):
                router.on_answer(
                    line_of(
                        scope,
                        status=status,
                        duration_s=router.now_s() - begun_s,
                        sent_bytes=sent,
                        request_id=admitted.request_id,
                        key=admitted.key.name if admitted.key else None,
                    )
                )


async def body_of(request: Request, limit: int) -> bytes:
    received = bytearray()
    async for piece in request.stream():
        received += piece
        if len(received) > limit:
            raise too_large(len(received), limit)
    return bytes(received)


def _some(names: Collection[str]) -> str:
    more = len(names) - MOST_NAMES
    return (", ".join(islice(names, MOST_NAMES)) or "none") + (f" and {more:,} more" if more > 0 else "")


def _file(request: Request, path: str) -> Response:
    found = files.find(path)
    if found is None:
        raise not_found(request.url.path)
    headers = files.HEADERS | {"ETag": found.etag}
    if request.headers.get("if-none-match") == found.etag:
        return Response(status_code=304, headers=headers)
    return Response(found.content, headers=headers, media_type=found.content_type)


def limit_of(request: Request, usual: int) -> int:
    text = request.query_params.get("limit", str(usual))
    if not text.isdecimal() or len(text) > 9 or int(text) < 1:
        raise invalid(f"limit is {text[:20]!r}; write a whole number above 0 with 9 digits at most", "limit")
    return int(text)


def build_app(router: Router, upkeep: Upkeep, dashboard: Dashboard | None = None) -> FastAPI:
    """Without a dashboard that runs, it has one that keeps nothing."""
    app = FastAPI(title="warmroute router", version=version("warmroute"), redirect_slashes=False)
    _add_routes(app, Endpoints(router, upkeep, dashboard or Dashboard(router)))
    _add_error_answers(app)
    app.openapi = lambda: document(app, router.members.models)  # type: ignore[method-assign]
    app.add_middleware(Guard, router=router)
    if router.config.cors_origins:  # outside the guard: a browser asks first, without the key
        app.add_middleware(
            CORSMiddleware, allow_origins=list(router.config.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )
    return app


def _add_routes(app: FastAPI, endpoints: Endpoints) -> None:
    def add(method: str, path: str, endpoint: Callable[..., Awaitable[Response]]) -> None:
        app.add_api_route(path, endpoint, methods=[method], openapi_extra=control(method, path))

    for path in DIRECT:
        app.add_api_route(path, endpoints.direct, methods=["POST"], openapi_extra=direct(path))
    add("GET", "/v1/models", endpoints.models)
    add("GET", "/v1/models/{model:path}", endpoints.model_named)
    add("GET", "/health", endpoints.health)
    add("GET", "/ready", endpoints.ready)
    add("GET", "/metrics", endpoints.metrics)
    add("GET", "/version", endpoints.version)
    add("GET", "/replicas", endpoints.replicas)
    add("POST", "/replicas", endpoints.add_replica)
    add("DELETE", "/replicas/{name}", endpoints.remove_replica)
    add("POST", "/replicas/{name}/drain", endpoints.drain)
    add("POST", "/replicas/{name}/undrain", endpoints.undrain)
    add("POST", "/replicas/{name}/resync", endpoints.resync)
    add("POST", "/explain", endpoints.explain)
    add("GET", "/decisions", endpoints.decisions)
    add("GET", "/decisions/{request_id:path}", endpoints.decision)
    add("GET", "/prefixes", endpoints.prefixes)
    add("GET", "/debug/index", endpoints.debug_index)
    add("GET", "/dashboard/replicas/{name}", endpoints.dashboard_replica)
    # Made for one page; a stream without an end is nothing to try out of a document.
    app.add_api_route("/dashboard/feed", endpoints.dashboard_feed, methods=["GET"], include_in_schema=False)
    for path, page in (("/dashboard", endpoints.dashboard_index), ("/dashboard/{path:path}", endpoints.dashboard_file)):
        app.add_api_route(path, page, methods=["GET", "HEAD"], include_in_schema=False)


def _methods(app: FastAPI, scope: Scope) -> list[str]:
    """Of all routes of a path; Starlette's own answer names those of the first one."""
    return sorted(
        {
            method
            for route in app.routes
            if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE
            for method in route.methods or ()
        }
    )


def _add_error_answers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def routing_error(request: Request, error: HTTPException) -> Response:
        path = request.url.path
        match error.status_code:
            case 404 if path in POST_ONLY:
                return error_response(method_not_allowed(request.method, path, ["POST"]))
            case 404:
                return error_response(not_found(path))
            case 405:
                return error_response(method_not_allowed(request.method, path, _methods(app, request.scope)))
        return error_response(ApiError(error.status_code, str(error.detail)))

    @app.exception_handler(RequestValidationError)
    async def bad_parameter(_: Request, error: RequestValidationError) -> Response:
        first: Mapping[str, Any] = error.errors()[0]
        return error_response(invalid(first["msg"], ".".join(map(str, first["loc"]))))

    @app.exception_handler(ClientDisconnect)
    async def client_left(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=400)  # nobody reads it

    @app.exception_handler(Exception)
    async def unexpected(_: Request, __: Exception) -> Response:
        return error_response(internal())  # the server logs the exception, which Starlette raises again
