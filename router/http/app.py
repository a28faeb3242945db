"""The app for all routes that the router answers itself, behind a gate that admits requests."""

from functools import partial
from typing import Any
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import ApiError, internal
from api.http.responses import error_response
from api.http.routes import Role, RouteTable, check_preflight, mark_admitted, route_for, served
from router.core import Router
from router.dashboard.dashboard import Dashboard
from router.http.document import DIRECT, document
from router.http.endpoints import Endpoints
from router.http.one_answer import OneAnswer, answer_of
from router.http.routes import APP_ROUTES
from router.monitor.upkeep import Upkeep
from router.records.access_log import line_of
from router.tenants.admission import Admitted
from router.workers.colleagues import Answer, Answering, Asked

ERRORS: tuple[Any, ...] = (ApiError, HTTPException, ClientDisconnect, Exception)
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
            router.history.turned_away(scope, error)
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
            if router.history.access_log is not None and asked.who is not Role.ANYONE:
                router.history.access_log(
                    line_of(
                        scope,
                        status=status,
                        duration_s=router.now_s() - begun_s,
                        sent_bytes=sent,
                        request_id=admitted.request_id,
                        key=admitted.key.name if admitted.key else None,
                    )
                )


def build_app(router: Router, upkeep: Upkeep, table: RouteTable, dashboard: Dashboard | None = None) -> Starlette:
    """The app. Without a dashboard that runs, it gets one that records nothing."""
    endpoints = Endpoints(router, upkeep, dashboard or Dashboard(router))
    routes = served(APP_ROUTES, endpoints) + [route_for(["POST"], path, _past_the_app) for path in DIRECT]
    middleware = [Middleware(RouterGate, router=router, table=table)]
    if router.config.cors_origins:  # outside the gate: a browser asks first, without the key
        origins = list(router.config.cors_origins)
        middleware.insert(
            0, Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
        )
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=dict.fromkeys(ERRORS, _refuse))
    app.router.redirect_slashes = False
    app.state.documenting = lambda: partial(document, APP_ROUTES, [*router.members.models])
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


async def _past_the_app(_: Request) -> Response:
    """A placeholder: these requests never reach the app."""
    raise internal()


async def _refuse(_: Request, error: Exception) -> Response:
    match error:
        case ApiError():
            return error_response(error)
        case HTTPException():
            return error_response(ApiError(error.status_code, str(error.detail)))
        case ClientDisconnect():
            return Response(status_code=400)  # never read: the client is gone
    return error_response(internal())  # the server logs the exception, which Starlette raises again
