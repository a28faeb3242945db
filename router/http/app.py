"""The app for all routes that the router answers itself, behind a gate that admits requests."""

from collections.abc import Callable
from dataclasses import dataclass
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
from router.dashboard.alerts import Alerts
from router.dashboard.dashboard import Dashboard
from router.dashboard.sampling import OtherWorkers, Sampling
from router.dashboard.sharing import SharedPrefixes
from router.dashboard.status import Statuses
from router.http.document import DIRECT, document
from router.http.endpoints import Endpoints
from router.http.metrics import Printed
from router.http.one_answer import answer_of, one_answer, scope_with
from router.http.routes import APP_ROUTES
from router.monitor.upkeep import Upkeep
from router.records.access_log import encode, line_of
from router.records.history import History
from router.tenants.admission import Admission, Admitted
from router.workers.colleagues import Answer, Asked, Colleagues
from router.workers.peer_links import Links

ERRORS: tuple[Any, ...] = (ApiError, HTTPException, ClientDisconnect, Exception)
FROM_WORKER = "from_worker"  # the scope of a request that another worker has admitted has it


@dataclass(slots=True, eq=False)
class RouterGate:
    """Admits each request before the app sees it, as `front.py` does for requests that bypass the app."""

    app: ASGIApp
    table: RouteTable
    admission: Admission
    history: History
    colleagues: Colleagues | None
    now_s: Callable[[], float]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope.get(FROM_WORKER):
            mark_admitted(scope, self.table.asked(scope))
            await self.app(scope, receive, send)
            return
        try:
            asked = self.table.asked(scope)
            check_preflight(scope, asked, "start the router with --cors-origin ORIGIN")
            admitted = self.admission.admit(scope, asked.who, self.now_s())
        except ApiError as error:
            self.history.turned_away(scope, error)
            await error_response(error, scope["path"])(scope, receive, send)
            return
        scope["state"]["admitted"] = admitted
        status, begun_s, sent = 0, self.now_s(), 0

        async def count(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
                told = [] if admitted.charge is None else admitted.charge.headers(self.now_s())
                more = [(name.encode(), value.encode()) for name, value in told]
                message["headers"] = [*message["headers"], (b"x-request-id", admitted.request_id.encode()), *more]
            else:
                sent += len(message.get("body", b""))
            await send(message)

        try:
            mark_admitted(scope, asked)
            if self.colleagues is None:
                await self.app(scope, receive, count)
            else:
                await one_answer(self.app, self.colleagues, scope, receive, count)
        except ApiError as error:
            await error_response(error, scope["path"])(scope, receive, count)
        finally:
            self.admission.release(admitted)
            is_polled = asked.who is Role.ANYONE or scope["path"].startswith("/dashboard/")
            if self.history.access_log is not None and not is_polled:
                line = line_of(
                    scope,
                    status=status,
                    duration_s=self.now_s() - begun_s,
                    sent_bytes=sent,
                    request_id=admitted.request_id,
                    key=admitted.key.name if admitted.key else None,
                )
                self.history.access_log.add(encode(line))


def dashboard_of(router: Router, colleagues: Colleagues | None = None) -> Dashboard:
    """A dashboard, which shows nothing of the past until it runs."""
    members, placement, history = router.members, router.placement, router.history
    sampling = Sampling(members, router.now_s, router.waiting, history.counts, OtherWorkers(colleagues))
    statuses = Statuses(members, placement, router.admission, history.decisions, sampling)
    alerts = Alerts(router.config.policy, members, history)
    prefixes = SharedPrefixes(members, placement, history, colleagues, router.now_s, router.config.shows_texts)
    return Dashboard(router.config, router.lifecycle, colleagues, statuses, alerts, prefixes)


def printed_by(router: Router, links: Links | None = None) -> Printed:
    """The figures of /metrics; `links`: to other routers."""
    parts = router.lifecycle, router.members, router.placement, router.waiting
    return Printed(*parts, router.history.counts, router.ledger, links, router.now_s, router.asking)


def build_app(
    router: Router,
    upkeep: Upkeep,
    table: RouteTable,
    dashboard: Dashboard | None = None,
    colleagues: Colleagues | None = None,
    links: Links | None = None,
) -> Starlette:
    """The app. Without a dashboard that runs, it gets one that records nothing."""
    dashboard, printed = dashboard or dashboard_of(router), printed_by(router, links)
    endpoints = Endpoints(router, upkeep, router.history, router.ledger, dashboard, printed, colleagues)
    routes = served(APP_ROUTES, endpoints) + [route_for(["POST"], path, _past_the_app) for path in DIRECT]
    gate = partial(RouterGate, table=table, admission=router.admission, history=router.history)
    middleware = [Middleware(gate, colleagues=colleagues, now_s=router.now_s)]
    if router.config.cors_origins:  # outside the gate: a browser asks first, without the key
        origins = list(router.config.cors_origins)
        middleware.insert(
            0, Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
        )
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=dict.fromkeys(ERRORS, _refuse))
    app.router.redirect_slashes = False
    app.state.documenting = lambda: partial(document, APP_ROUTES, [*router.members.models])
    return app


async def answered(app: ASGIApp, asked: Asked) -> Answer:
    """Answer what another worker has admitted."""

    async def receive() -> Message:
        return {"type": "http.request", "body": asked.body, "more_body": False}

    scope = scope_with(
        asked.method,
        unquote(asked.raw_path.decode("ascii")),
        asked.raw_path,
        query_string=asked.query,
        headers=[(b"content-length", b"%d" % len(asked.body))],
        state={"admitted": Admitted("", admin=asked.sees_all)},
    )
    scope[FROM_WORKER] = True
    return await answer_of(app, scope, receive)


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
