"""Endpoints that the router answers itself: models, health, metrics, replicas, decisions and the dashboard."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from itertools import islice
from typing import Any, NoReturn

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from api.errors import ApiError, draining, invalid, not_found, quoted
from api.http import documents
from api.http.bodies import Bodies, check_coding, declared_size
from api.http.prometheus import CONTENT_TYPE
from api.http.responses import json_response
from api.messages.models import listed, shown
from api.responses import Model
from router.dashboard import static_files
from router.dashboard.dashboard import Dashboard
from router.dashboard.rows import query_of
from router.dashboard.status import for_clients
from router.http.at_replicas import change_adapter, reset_caches
from router.http.document import TITLE
from router.http.explaining import explained
from router.http.metrics import Printed, metrics_text
from router.http.usage import MAX_ROWS, usage_answer
from router.members.broken import no_replica
from router.members.members import Member, ServedModel, Server
from router.members.spec import BadSpec, spec_of
from router.monitor.upkeep import Upkeep
from router.proxy.exchange import too_large
from router.proxy.services import Services
from router.records.history import History
from router.tenants.ledger import Ledger
from router.workers.colleagues import Colleagues
from router.workers.questions import NOT_READY

DONE = {"status": "ok"}
PLACES = {"api": "/v1", "dashboard": "/dashboard", "docs": "/docs", "health": "/health", "metrics": "/metrics"}
USUAL_DECISIONS = 100
MAX_SMALL_BODY = 1024 * 1024
MAX_NAMES = 10  # the replicas that an error lists


@dataclass(eq=False)
class Endpoints:
    services: Services
    upkeep: Upkeep
    history: History
    ledger: Ledger
    board: Dashboard
    printed: Printed
    colleagues: Colleagues | None

    def __post_init__(self) -> None:
        self._members, self._lifecycle = self.services.members, self.services.lifecycle
        self._statuses, self._bodies = self.board.statuses, self.services.bodies
        self._sharing = asyncio.Lock()  # a tree is work for a thread: one at a time

    # ---- models

    async def models(self, request: Request) -> Response:
        """The models that clients may ask for, under other names as well."""
        served, others = self._members.models, self.services.model_rewrites.exact
        names = [*served, *(name for name, target in others.items() if name not in served and target in served)]
        return json_response(listed([self._model(name) for name in names], request.headers))

    async def model_named(self, request: Request) -> Response:
        name = request.path_params["model"]
        if not self._served(name).members:
            raise no_replica(f"the model {quoted(name)} has no replica at the moment")
        return json_response(shown(self._model(name), request.headers))

    def _served(self, name: str) -> ServedModel:
        """The model, or the one that stands for it."""
        members, target = self._members, self.services.model_rewrites.target(name)
        return members.model(target if target in members.models else name)

    def _model(self, name: str) -> Model:
        served = self._served(name)
        longest = max((one.max_model_len for one in served.candidates if one.max_model_len), default=msgspec.UNSET)
        parent = msgspec.UNSET if served.lora is None else served.tokens.model
        return Model(id=name, created=self._lifecycle.started, max_model_len=longest, parent=parent)

    # ---- the first look

    async def root(self, request: Request) -> Response:
        """Redirect browsers to the dashboard; tell programs what is here."""
        is_browser = "text/html" in request.headers.get("accept", "").lower()
        answer = RedirectResponse("dashboard") if is_browser else json_response({"server": TITLE, **PLACES})
        answer.headers["Vary"] = "Accept"
        return answer

    # ---- health

    async def health(self, _: Request) -> Response:
        return json_response(DONE)

    async def ready(self, _: Request) -> Response:
        if self._lifecycle.draining:
            raise draining()
        why = "the router is about to end" if self._lifecycle.leaving else self._lifecycle.not_ready()
        if why is None and self._lifecycle.index_awaited_until_s and self.colleagues is not None:
            # The next request may come to another worker, which may have begun later.
            why = next(filter(None, (await self.colleagues.told(NOT_READY)).values()), None)
        if why is not None:
            raise ApiError(503, why, "service_unavailable", code="not_ready", headers={"Retry-After": "1"})
        self._lifecycle.index_awaited_until_s = 0.0  # a caller that saw "ready" sends requests
        return json_response(DONE)

    async def metrics(self, request: Request) -> Response:
        shows_keys = request.state.admitted.admin  # their names are for administrators
        return Response(await metrics_text(self.printed, shows_keys=shows_keys), media_type=CONTENT_TYPE)

    async def version(self, _: Request) -> Response:
        return json_response({"version": version("warmroute")})

    async def usage(self, request: Request) -> Response:
        limit = limit_of(request.query_params, MAX_ROWS)
        asked = request.query_params, limit, request.state.admitted
        return await usage_answer(self.ledger, self.colleagues, *asked)

    # ---- replicas

    async def replicas(self, request: Request) -> Response:
        statuses = await self._statuses.all()
        if not request.state.admitted.admin:
            statuses = [for_clients(each) for each in statuses]
        return json_response({"replicas": statuses})

    async def add_replica(self, request: Request) -> Response:
        try:
            async with body_of(request, MAX_SMALL_BODY, self._bodies) as body:
                spec = spec_of(msgspec.json.decode(body, type=dict[str, Any]))
            if spec.api_key_env or spec.curve_secret:  # an administrator need not have access to these
                raise invalid("api_key_env and the files of CURVE keys can be set only at the router's start")
            self.upkeep.add(spec)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise invalid(f"the body is not a JSON object that describes a replica: {error}") from error
        except BadSpec as error:
            raise invalid(str(error)) from error
        return json_response(self._statuses.one(self._members.by_name[spec.name]), 201)

    async def remove_replica(self, request: Request) -> Response:
        server = self._server(request)
        try:
            self.upkeep.remove(server.name)
        except BadSpec as error:
            raise ApiError(409, str(error), code="named_by_discovery") from error
        return json_response(DONE)

    async def drain(self, request: Request) -> Response:
        server = self._server(request)
        server.health.drain()
        return self._status_of(request, server)

    async def undrain(self, request: Request) -> Response:
        server = self._server(request)
        server.health.undrain()
        return self._status_of(request, server)

    async def resync(self, request: Request) -> Response:
        member = self._member(request)
        if member.feed is not None:
            member.feed.resync("requested by an administrator")
        return json_response(self._statuses.one(member))

    def _member(self, request: Request) -> Member:
        name = request.path_params["name"]
        return self._members.by_name.get(name) or self._unknown(name)

    def _server(self, request: Request) -> Server:
        """The address of the replica; a name without its rank stands for all of its ranks."""
        name = request.path_params["name"]
        return self._members.server(name) or self._unknown(name)

    def _unknown(self, name: str) -> NoReturn:
        names = self._members.by_name
        known = ", ".join(islice(names, MAX_NAMES)) or "none"
        more = f" and {len(names) - MAX_NAMES:,} more" if len(names) > MAX_NAMES else ""
        message = f"there is no replica named {name[:100]!r}; there are: {known}{more}"
        raise ApiError(404, message, code="replica_not_found")

    def _status_of(self, request: Request, server: Server) -> Response:
        member = self._members.by_name.get(request.path_params["name"], server.members[0])
        return json_response(self._statuses.one(member))

    async def load_adapter(self, request: Request) -> Response:
        return await self._change_adapter(request, load=True)

    async def unload_adapter(self, request: Request) -> Response:
        return await self._change_adapter(request, load=False)

    async def _change_adapter(self, request: Request, *, load: bool) -> Response:
        async with body_of(request, MAX_SMALL_BODY, self._bodies) as body:
            status, report = await change_adapter(self._members, self.upkeep, self.colleagues, body, load=load)
        return json_response(report, status)

    async def reset_caches(self, request: Request) -> Response:
        services, query = self.services, request.query_params.multi_items()
        parts = services.members, services.placement, self.colleagues
        status, report = await reset_caches(*parts, query)
        return json_response(report, status)

    # ---- why

    async def explain(self, request: Request) -> Response:
        async with body_of(request, self.services.config.max_body_bytes, self._bodies) as body:
            asked = body, request.scope["headers"], request.state.admitted, request.query_params.get("api")
            return json_response(await explained(self.services, *asked))

    async def decisions(self, request: Request) -> Response:
        remembered = list(self.history.decisions)[-limit_of(request.query_params, USUAL_DECISIONS) :][::-1]
        return json_response({"decisions": [one.record() for one in remembered]})

    async def decision(self, request: Request) -> Response:
        wanted = request.path_params["request_id"]
        remembered = reversed(self.history.decisions)
        found = next((one for one in remembered if one.outcome.request_id == wanted), None)
        if found is None:
            message = f"no decision about a request {quoted(wanted)} is remembered; see GET /decisions"
            raise ApiError(404, message, code="decision_not_found")
        return json_response(found.record())

    async def sessions(self, request: Request) -> Response:
        """Those that wait to begin, and the last ones that had a turn."""
        limit, now_s = limit_of(request.query_params, USUAL_DECISIONS), self.services.now_s()
        models = {model: one.rows(now_s, limit) for model, one in self.services.placement.working_sets.items()}
        return json_response({"models": models})

    async def prefixes(self, request: Request) -> Response:
        limit = limit_of(request.query_params, 20)
        async with self._sharing:
            return json_response(await self.board.prefixes.shared(limit))

    async def debug_index(self, _: Request) -> Response:
        return json_response(self._statuses.sizes(len(self.history.recent)))

    # ---- documents

    async def docs(self, _: Request) -> Response:
        return await documents.docs(TITLE)

    async def docs_file(self, request: Request) -> Response:
        return await documents.file(request.path_params["file"], request.scope["path"])

    async def openapi(self, request: Request) -> Response:
        return await documents.openapi(request.app.state.documenting())

    # ---- the dashboard

    async def dashboard_index(self, request: Request) -> Response:
        return _file(request, static_files.INDEX)

    async def dashboard_without_slash(self, _: Request) -> Response:
        return RedirectResponse("../dashboard", 308)

    async def dashboard_file(self, request: Request) -> Response:
        return _file(request, request.path_params["path"])

    async def dashboard_fleet(self, request: Request) -> Response:
        query = query_of(request.query_params)
        frame = await self.board.frame(query, admin=request.state.admitted.admin)
        return Response(frame, media_type="application/json")

    async def dashboard_history(self, _: Request) -> Response:
        return json_response(self.board.history())

    async def dashboard_replica(self, request: Request) -> Response:
        await self._statuses.sampling.others.look()
        return json_response(self.board.replica(self._member(request), admin=request.state.admitted.admin))


@asynccontextmanager
async def body_of(request: Request, limit: int, bodies: Bodies) -> AsyncIterator[bytes]:
    """Read the whole body, counted while it is used; raise ApiError 413, 415 or 429."""
    check_coding(request.headers.get("content-encoding", ""))
    bodies.check(min(declared_size(request.headers.get("content-length", "")) or 0, limit))
    received, held = bytearray(), 0
    try:
        async for piece in request.stream():
            if len(received) + len(piece) > limit:
                raise too_large(len(received) + len(piece), limit)
            held = bodies.claim(len(received) + len(piece), held)
            received += piece
        yield bytes(received)
    finally:
        bodies.release(held)


def _file(request: Request, path: str) -> Response:
    found = static_files.find(path)
    if found is None:
        raise not_found(request.scope["path"])
    headers = static_files.HEADERS | {"ETag": found.etag}
    if request.headers.get("if-none-match") == found.etag:
        return Response(status_code=304, headers=headers)
    return Response(found.content, headers=headers, media_type=found.content_type)


def limit_of(query: QueryParams, usual: int) -> int:
    text = query.get("limit", str(usual))
    if not text.isdecimal() or len(text) > 9 or int(text) < 1:
        raise invalid(f"limit is {text[:20]!r}; write a whole number above 0 with 9 digits at most", "limit")
    return int(text)
