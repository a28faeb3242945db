"""The app for all routes that the router answers itself, behind a gate that admits requests."""

from importlib.metadata import version
from urllib.parse import unquote

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import ApiError, internal
from api.http.responses import error_response
from api.http.routes import Role, RouteTable, add_routes, check_preflight, mark_admitted
from router.core import Router
from router.dashboard.dashboard import Dashboard
from router.http.document import DIRECT, control, direct, document
from router.http.endpoints import Endpoints
from router.http.one_answer import OneAnswer, answer_of
from router.http.routes import APP_ROUTES
from router.proxy.admission import Admitted
from router.records.access_log import line_of
from router.upkeep import Upkeep
from router.workers.colleagues import Answer, Answering, Asked

FROM_WORKER = "from_worker"  # in the scope of a request that another worker has admitted


class RouterGate:
    """Admits each request before the app sees it, as `opening.py` does for requests that bypass the app."""

    def __init__(self, app: ASGIApp, router: Router, table: RouteTable) -> None:
        self._app = app
        self._router = router
        self._table = table

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope.get(FROM_WORKER):
            mark_admitted(scope, self._table.asked(scope))
            await self._app(scope, receive, send)
            return
        router = self._router
        try:
            asked = self._table.asked(scope)
            check_preflight(scope, asked, "start the router with --cors-origin ORIGIN")
            admitted = router.admission.admit(
                scope["headers"],
                asked.who,
                scope["client"],
                router.now_s(),
                path=scope["path"],
                http_version=scope["http_version"],
            )
        except ApiError as error:
            router.turned_away(scope, error)
            await error_response(error, scope["path"])(scope, receive, send)
            return
        scope["state"]["admitted"] = admitted
        status, begun_s, sent = 0, router.now_s(), 0

        async def count(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
                told = [] if admitted.charge is None else admitted.charge.headers(router.now_s())
                more = [(name.encode(), value.encode()) for name, value in told]
                message["headers"] = [*message["headers"], (b"x-request-id", admitted.request_id.encode()), *more]
            else:
                sent += len(message.get("body", b""))
            await send(message)

        try:
            mark_admitted(scope, asked)
            app = self._app if router.colleagues is None else OneAnswer(self._app, router.colleagues)
            await app(scope, receive, count)
        except ApiError as error:
            await error_response(error, scope["path"])(scope, receive, count)
        finally:
            router.admission.release(admitted)
            if router.on_answer is not None and asked.who is not Role.ANYONE:
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


def build_app(router: Router, upkeep: Upkeep, table: RouteTable, dashboard: Dashboard | None = None) -> FastAPI:
    """The app. Without a dashboard that runs, it gets one that records nothing."""
    app = FastAPI(
        title="warmroute router",
        version=version("warmroute"),
        redirect_slashes=False,
        openapi_url=None,  # and so no routes but those of the table
    )
    endpoints = Endpoints(router, upkeep, dashboard or Dashboard(router))
    add_routes(app, APP_ROUTES, endpoints, lambda method, route: control(method, route.template))
    for path in DIRECT:
        app.add_api_route(path, _past_the_app, methods=["POST"], openapi_extra=direct(path))
    _add_error_answers(app)
    app.openapi = lambda: document(app, router.members.models)  # type: ignore[method-assign]
    app.add_middleware(RouterGate, router=router, table=table)
    if router.config.cors_origins:  # outside the gate: a browser asks first, without the key
        app.add_middleware(
            CORSMiddleware, allow_origins=list(router.config.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )
    return app


def answering(app: ASGIApp) -> Answering:
    """Answer what other workers have admitted."""

    async def answer(asked: Asked) -> Answer:
        async def receive() -> Message:
            return {"type": "http.request", "body": asked.body, "more_body": False}

        raw_path = asked.raw_path.decode("ascii")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": asked.method,
            "scheme": "http",
            "path": unquote(raw_path),
            "raw_path": asked.raw_path,
            "root_path": "",
            "query_string": asked.query,
            "headers": [*asked.headers, (b"content-length", b"%d" % len(asked.body))],
            "client": None,
            "server": None,
            "state": {"admitted": Admitted("", admin=asked.sees_all)},
            FROM_WORKER: True,
        }
        return await answer_of(app, scope, receive)

    return answer


async def _past_the_app() -> Response:
    """A placeholder for the OpenAPI document: these requests never reach the app."""
    raise internal()


def _add_error_answers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def routing_error(_: Request, error: HTTPException) -> Response:
        return error_response(ApiError(error.status_code, str(error.detail)))

    @app.exception_handler(ClientDisconnect)
    async def client_left(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=400)  # never read: the client is gone

    @app.exception_handler(Exception)
    async def unexpected(_: Request, __: Exception) -> Response:
        return error_response(internal())  # the server logs the exception, which Starlette raises again
