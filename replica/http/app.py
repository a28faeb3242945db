"""The replica's HTTP API: which path leads where. A generation request goes through `intake`, `work`, `answering`."""

import copy
import hmac
import logging
import time
from importlib.metadata import version
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from api import schema
from api.errors import ApiError, draining, unauthorized
from api.http.answers import error_response, json_response
from api.native import FRAMES_TYPE
from api.prompts import Prompts
from api.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest, read
from api.responses import ChatCompletion, Completion, DetokenizedPrompt, Model, ModelList, Tokens
from api.sse import CONTENT_TYPE as SSE_TYPE
from replica.client import EngineClient
from replica.config import ReplicaConfig
from replica.http.answering import Answering
from replica.http.errors import add_error_answers, unavailable
from replica.http.forms import form_of
from replica.http.intake import GenerationRequest, Reader
from replica.http.metrics import CONTENT_TYPE, Metrics
from replica.http.work import Served, plan, size_of_plan
from replica.messages import Hello

log = logging.getLogger(__name__)

# What probes and Prometheus ask for, without a key: nothing there tells what clients say.
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
DONE = {"status": "ok"}
TOKENIZE_BYTES = 4 * 1024 * 1024  # of a body of /tokenize and /detokenize, whose answers are several times as long
SILENCE_LIMIT_S = 2.0  # the engine reports four times a second


class Endpoints:
    """What the routes share, and whether new work is still taken."""

    def __init__(self, engine: EngineClient, prompts: Prompts, config: ReplicaConfig) -> None:
        self.engine = engine
        self.prompts = prompts
        self.config = config
        self.model = config.engine.model
        self.metrics = Metrics(self.model, config.engine.block_size, lambda: engine.stats)
        self.reader = Reader(prompts, self.model, config.max_body_bytes)
        self.created = int(time.time())

    # ---- generation

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, CompletionRequest)

    async def chat_completions(self, request: Request) -> Response:
        return await self._generate(request, ChatRequest)

    async def _generate(self, request: Request, request_type: type[GenerationRequest]) -> Response:
        arrived_s = time.perf_counter()
        hello = self._open()
        intake = await self.reader.generation(request, request_type, hello.max_model_len)
        tokenizer = self.prompts.tokenizer
        served = Served(hello.max_model_len, tokenizer, self.config.engine.eos_token_ids)
        work = await self.reader.aside(
            request, size_of_plan(intake), lambda: plan(*intake, served=served, new_id=self.engine.new_id)
        )
        self._open()  # draining may have begun while the body came
        framed = FRAMES_TYPE in request.headers.get("accept", "")
        form = form_of(work, self.model, tokenizer)
        return Answering(work, self.engine, form, self.metrics, framed=framed, arrived_s=arrived_s)

    def _open(self) -> Hello:
        """ApiError 503 when no work can be taken (yet, or any more)."""
        if self.metrics.draining:
            raise draining()
        if self.engine.hello is None:
            raise unavailable("the model is still being loaded; try again", "loading")
        return self.engine.hello

    # ---- tokens and models

    async def models(self) -> Response:
        return json_response(ModelList(data=[self._model()]))

    async def model_named(self, request: Request) -> Response:
        self.reader.check_model(request.path_params["model"])
        return json_response(self._model())

    def _model(self) -> Model:
        hello = self.engine.hello
        length = msgspec.UNSET if hello is None else hello.max_model_len
        return Model(id=self.model, created=self.created, max_model_len=length)

    async def tokenize(self, request: Request) -> Response:
        hello = self._open()
        body = await self.reader.body(request, TOKENIZE_BYTES)
        return await self.reader.aside(request, len(body), lambda: json_response(self._tokens(body, hello)))

    def _tokens(self, body: bytes, hello: Hello) -> Tokens:
        request = read(body, TokenizeRequest)
        self.reader.check_model(request.model)
        tokens = self.prompts.tokenize(request)
        strings = None
        if request.return_token_strs:
            strings = [self.prompts.tokenizer.token_bytes(token).decode(errors="replace") for token in tokens]
        return Tokens(count=len(tokens), max_model_len=hello.max_model_len, tokens=tokens, token_strs=strings)

    async def detokenize(self, request: Request) -> Response:
        body = await self.reader.body(request, TOKENIZE_BYTES)
        return await self.reader.aside(request, len(body), lambda: json_response(self._text(body)))

    def _text(self, body: bytes) -> DetokenizedPrompt:
        request = read(body, DetokenizeRequest)
        self.reader.check_model(request.model)
        return DetokenizedPrompt(self.prompts.detokenize(request))

    # ---- operation

    async def reset_prefix_cache(self) -> Response:
        self._open()
        if not await self.engine.reset():
            message = "requests are running, and the cache holds what they use; try again when they have ended"
            raise ApiError(409, message, code="cache_in_use")
        return json_response(DONE)

    async def health(self) -> Response:
        return json_response(DONE)

    async def ready(self) -> Response:
        self._open()
        if self.engine.silent_s > SILENCE_LIMIT_S:
            message = f"the engine has said nothing for {self.engine.silent_s:.1f} s; try again"
            raise unavailable(message, "engine_silent")
        return json_response(DONE)

    async def load(self) -> Response:
        return json_response(self._load())

    def _load(self) -> dict[str, Any]:
        hello, stats = self.engine.hello, self.engine.stats
        return {
            "model": self.model,
            "ready": hello is not None and not self.metrics.draining and self.engine.silent_s <= SILENCE_LIMIT_S,
            "draining": self.metrics.draining,
            "tokenizer": self.prompts.tokenizer.name,
            "block_size": self.config.engine.block_size,
            "max_model_len": hello.max_model_len if hello else self.config.engine.max_model_len,
            "incarnation": hello.incarnation if hello else None,
            "topic": hello.topic if hello else None,
            "endpoints": hello.endpoints if hello else None,
            "open_requests": self.metrics.open_requests,
            "load": msgspec.structs.asdict(stats.load),
            "pool": msgspec.structs.asdict(stats.pool),
            "rates": msgspec.structs.asdict(stats.rates),
        }

    async def expose_metrics(self) -> Response:
        return Response(self.metrics.text(), media_type=CONTENT_TYPE)

    async def version(self) -> Response:
        return json_response({"version": version("warmroute")})


class KeyGuard:
    """Asks for `Authorization: Bearer KEY` everywhere but at the open paths."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._knows_key(scope):
            await error_response(unauthorized())(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _knows_key(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, key = given[0].partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(b" "), self._key)


def build_app(engine: EngineClient, prompts: Prompts, config: ReplicaConfig) -> FastAPI:
    endpoints = Endpoints(engine, prompts, config)
    app = FastAPI(title="warmroute replica", version=version("warmroute"), redirect_slashes=False)
    app.state.endpoints = endpoints
    _add_routes(app, endpoints)
    add_error_answers(app, endpoints.metrics)
    if config.api_key is not None:
        app.add_middleware(KeyGuard, key=config.api_key)
    app.openapi = lambda: _openapi(app, endpoints.model)  # type: ignore[method-assign]
    return app


def _add_routes(app: FastAPI, endpoints: Endpoints) -> None:
    def add(path: str, endpoint: Any, request: Any = None, answer: Any = None, method: str = "POST") -> None:
        extra = _operation(request, answer, generates=answer in (Completion, ChatCompletion))
        app.add_api_route(path, endpoint, methods=[method], openapi_extra=extra)

    add("/v1/completions", endpoints.completions, CompletionRequest, Completion)
    add("/v1/chat/completions", endpoints.chat_completions, ChatRequest, ChatCompletion)
    add("/v1/models", endpoints.models, None, ModelList, "GET")
    app.add_api_route(
        "/v1/models/{model:path}",
        endpoints.model_named,
        methods=["GET"],
        openapi_extra=_operation(None, Model, generates=False) | {"parameters": [_MODEL_IN_PATH]},
    )
    add("/tokenize", endpoints.tokenize, TokenizeRequest, Tokens)
    add("/detokenize", endpoints.detokenize, DetokenizeRequest, DetokenizedPrompt)
    add("/reset_prefix_cache", endpoints.reset_prefix_cache)
    add("/health", endpoints.health, method="GET")
    add("/ready", endpoints.ready, method="GET")
    add("/load", endpoints.load, method="GET")
    add("/version", endpoints.version, method="GET")
    app.add_api_route("/metrics", endpoints.expose_metrics, methods=["GET"], openapi_extra=_METRICS)


# ---- what OpenAPI says

ERRORS = {
    400: "The request cannot be understood, or asks for what cannot be given",
    401: "The API key is missing or wrong",
    404: "The model is not served here",
    409: "The cache is in use",
    413: "The body, or the prompt, is too long",
    429: "Too many requests wait; Retry-After says when to try again",
    500: "The server failed",
    503: "Loading, draining, or the engine stopped",
}
_MODEL_IN_PATH = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
_METRICS = {"responses": {"200": {"description": "Prometheus text", "content": {"text/plain": {}}}}}


def _operation(request: Any, answer: Any, *, generates: bool) -> dict[str, Any]:
    operation = schema.operation(request, answer)
    error = operation["responses"]["default"]["content"]
    for status, description in ERRORS.items():
        operation["responses"][str(status)] = {"description": description, "content": error}
    if generates:
        operation["responses"]["200"]["content"] |= {SSE_TYPE: {}, FRAMES_TYPE: {}}
    return operation


def _openapi(app: FastAPI, model: str) -> dict[str, Any]:
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = copy.deepcopy(schema.components())
        for request in (CompletionRequest, ChatRequest):
            schemas[request.__name__]["properties"]["model"] = {"enum": [model]}
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
        app.openapi_schema = document
    return app.openapi_schema
