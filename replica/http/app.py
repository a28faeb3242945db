"""The replica's HTTP API. A generation request goes through `request_reader`, `work` and `generation_response`."""

import hmac
import logging
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from api.errors import ApiError, draining, unauthorized
from api.generation_apis import CHAT, COMPLETIONS, MESSAGES, RESPONSES, GenerationApi
from api.http import documents
from api.http.bodies import Bodies
from api.http.keys import shown_key
from api.http.prometheus import CONTENT_TYPE
from api.http.responses import JSON_TYPE, json_response
from api.http.routes import Gate, Role, RouteMatch, RouteTable, served
from api.messages.answers import MessageAnswer, TokenCount
from api.messages.conversion import counted_chat_of
from api.messages.models import listed, shown
from api.messages.requests import CountTokensRequest, MessagesRequest
from api.native import FRAMES_TYPE
from api.openai.engine_requests import DetokenizeRequest, TokenizeRequest
from api.openai.requests import ChatRequest, CompletionRequest, read
from api.openai.sampling import SamplingDefaults, sampling_defaults
from api.openai_responses.answers import DeletedResponse, ResponseAnswer
from api.openai_responses.requests import REFERENCE, ResponsesRequest, response_of
from api.parsing.formats import answer_formats
from api.prompts.prompts import Prompts
from api.responses import ChatCompletion, Completion, DetokenizedPrompt, Model, ModelList, Tokens
from replica.config import ReplicaConfig
from replica.grammar.checker import Checker
from replica.grammar.vocabulary import packed_vocabulary
from replica.http.conversation_forms import Conversation, StoredResponses, form_of
from replica.http.document import ONE_MODEL, ONE_RESPONSE, TITLE, Documented, document
from replica.http.engine_client import EngineClient
from replica.http.errors import error_answers, unavailable
from replica.http.generation_response import GenerationResponse
from replica.http.metrics import Metrics
from replica.http.request_reader import Reader
from replica.http.work import ScriptedAnswers, Served, plan, size_of_plan
from replica.messages import Hello

log = logging.getLogger(__name__)

DONE = {"status": "ok"}
TOKENIZE_BYTES = 4 * 1024 * 1024  # the limit for /tokenize and /detokenize, whose answers are several times as long
SILENCE_LIMIT_S = 2.0  # the engine reports four times a second


class Endpoints:
    """State that the routes share, among it whether new work is still taken."""

    def __init__(self, engine: EngineClient, prompts: Prompts, config: ReplicaConfig) -> None:
        self.engine = engine
        self.prompts = prompts
        self.config = config
        self.model = config.engine.model
        self.metrics = Metrics(self.model, config.engine.block_size, lambda: engine.stats)
        self.stored = StoredResponses()
        self.formats = answer_formats(
            prompts.tokenizer, prompts.templates, config.tool_call_parser, config.reasoning_parser
        )
        self.adapters = sorted(module.name for module in config.engine.lora_modules)
        self.reader = Reader(
            prompts,
            self.model,
            config.max_body_bytes,
            Bodies(config.max_bodies_bytes),
            frozenset(self.adapters),
            parses_calls=self.formats.tools is not None,
        )
        self.checker = Checker(self._vocabulary, self.metrics.constraint_limits)
        self.answers = ScriptedAnswers(config.simulated_answers, prompts.tokenizer)
        folder = config.engine.model_path
        self.sampling = sampling_defaults(Path(folder)) if folder else SamplingDefaults()
        self.created = int(time.time())

    # ---- generation

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, COMPLETIONS)

    async def chat_completions(self, request: Request) -> Response:
        return await self._generate(request, CHAT)

    async def messages(self, request: Request) -> Response:
        return await self._generate(request, MESSAGES)

    async def responses(self, request: Request) -> Response:
        return await self._generate(request, RESPONSES, self._complete)

    def _complete(self, asked: ResponsesRequest) -> None:
        """Look up what a request continues, unless it comes with it."""
        if asked.previous_response_id is not None and asked.previous_items is None:
            stored = self.stored.get(asked.previous_response_id, "previous_response_id")
            asked.previous_items = read(stored.conversation, Conversation).items
        named = [item.id for item in asked.items if item.type == REFERENCE]
        # The conversation of the newest of these responses has the items of all.
        if named and asked.referenced_items is None and (response_id := response_of(named[-1])) is not None:
            asked.referenced_items = read(self.stored.get(response_id, "input").conversation, Conversation).items

    async def _generate(
        self, request: Request, api: GenerationApi, complete: Callable[[Any], None] | None = None
    ) -> Response:
        arrived_s = time.perf_counter()
        hello = self._open()
        parsed = await self.reader.generation(request, api, hello.max_model_len, complete)
        tokenizer = self.prompts.tokenizer
        eos_token_ids = self.config.engine.eos_token_ids
        served = Served(
            hello.max_model_len,
            tokenizer,
            eos_token_ids,
            self.formats,
            self.answers,
            self.config.engine.retention_size,
            self.sampling,
        )
        work = await self.reader.aside(
            request, size_of_plan(parsed), lambda: plan(*parsed[:3], served, self.engine.new_id, *parsed[3:])
        )
        if work.asked is not None:
            await self.checker.check(work.asked)
            self.engine.learn(await self.checker.vocabulary())
        self._open()  # draining may have begun while the body came
        framed = FRAMES_TYPE in request.headers.get("accept", "")
        # A parser reads what another replica has said.
        form = await self.reader.aside(
            request,
            size_of_plan(parsed),
            lambda: form_of(work, parsed.request.model or self.model, tokenizer, self.stored),
        )
        return GenerationResponse(work, self.engine, form, self.metrics, framed=framed, arrived_s=arrived_s)

    def _vocabulary(self) -> bytes:
        """The tokens that the engine may draw: the model's, or all that the simulated one is given."""
        engine, tokenizer = self.config.engine, self.prompts.tokenizer
        size = engine.vocabulary[1]
        if engine.engine == "simulated":
            size = max(size, tokenizer.vocab_size)
        return packed_vocabulary(tokenizer, size, engine.eos_token_ids)

    def _open(self) -> Hello:
        """ApiError 503 when no work can be taken (yet, or any more)."""
        if self.metrics.draining:
            raise draining()
        if self.engine.hello is None:
            raise unavailable("the model is still being loaded; try again", "loading")
        return self.engine.hello

    # ---- stored responses

    async def response(self, request: Request) -> Response:
        return Response(self.stored.get(request.path_params["response_id"]).body, media_type=JSON_TYPE)

    async def response_conversation(self, request: Request) -> Response:
        """All items of a response, for a router that continues it anywhere."""
        return Response(self.stored.get(request.path_params["response_id"]).conversation, media_type=JSON_TYPE)

    async def delete_response(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        self.stored.remove(response_id)
        return json_response(DeletedResponse(id=response_id))

    # ---- tokens and models

    async def models(self, request: Request) -> Response:
        names = [self.model, *self.adapters]
        return json_response(listed([self._model(name) for name in names], request.headers))

    async def model_named(self, request: Request) -> Response:
        name = request.path_params["model"]
        self.reader.check_model(name)
        return json_response(shown(self._model(name), request.headers))

    def _model(self, name: str) -> Model:
        hello = self.engine.hello
        length = msgspec.UNSET if hello is None else hello.max_model_len
        parent = msgspec.UNSET if name == self.model else self.model
        return Model(id=name, created=self.created, max_model_len=length, parent=parent)

    async def tokenize(self, request: Request) -> Response:
        hello = self._open()

        def answer() -> Response:
            asked = read(body, TokenizeRequest)
            self.reader.check_model(asked.model)
            tokens, strings = self.prompts.tokenize(asked), None
            if asked.return_token_strs:
                strings = [self.prompts.tokenizer.token_bytes(token).decode(errors="replace") for token in tokens]
            counted = Tokens(count=len(tokens), max_model_len=hello.max_model_len, tokens=tokens, token_strs=strings)
            return json_response(counted)

        async with self.reader.body(request, TOKENIZE_BYTES) as body:
            return await self.reader.aside(request, len(body), answer)

    async def tokenizer_info(self, _: Request) -> Response:
        """As vLLM's, for clients that take the tokenizer from the server; fields of its `tokenizer_config.json`."""
        tokenizer = self.prompts.tokenizer
        template = self.prompts.given_template or tokenizer.chat_template
        lengths = {"model_max_length": self._open().max_model_len, "vocab_size": self.prompts.vocab_size}
        return json_response({**tokenizer.special_tokens, "chat_template": template, **lengths})

    async def count_message_tokens(self, request: Request) -> Response:
        hello = self._open()

        def answer() -> Response:
            asked = read(body, CountTokensRequest)
            self.reader.check_model(asked.model)
            return json_response(TokenCount(len(self.prompts.chat(counted_chat_of(asked), hello.max_model_len))))

        async with self.reader.body(request) as body:
            return await self.reader.aside(request, len(body), answer)

    async def detokenize(self, request: Request) -> Response:
        def answer() -> Response:
            asked = read(body, DetokenizeRequest)
            self.reader.check_model(asked.model)
            return json_response(DetokenizedPrompt(self.prompts.detokenize(asked)))

        async with self.reader.body(request, TOKENIZE_BYTES) as body:
            return await self.reader.aside(request, len(body), answer)

    # ---- operation

    async def reset_prefix_cache(self, _: Request) -> Response:
        self._open()
        if not await self.engine.reset():
            message = "requests are running, and the cache holds what they use; try again when they have ended"
            raise ApiError(409, message, code="cache_in_use")
        return json_response(DONE)

    async def health(self, _: Request) -> Response:
        return json_response(DONE)

    async def ready(self, _: Request) -> Response:
        self._open()
        if self.engine.silent_s > SILENCE_LIMIT_S:
            message = f"the engine has said nothing for {self.engine.silent_s:.1f} s; try again"
            raise unavailable(message, "engine_silent")
        return json_response(DONE)

    async def load(self, _: Request) -> Response:
        hello, stats = self.engine.hello, self.engine.stats
        load = {
            "model": self.model,
            "adapters": self.adapters or None,
            "ready": hello is not None and not self.metrics.draining and self.engine.silent_s <= SILENCE_LIMIT_S,
            "draining": self.metrics.draining,
            "tokenizer": self.prompts.tokenizer.name,
            "block_size": self.config.engine.block_size,
            "max_model_len": hello.max_model_len if hello else self.config.engine.max_model_len,
            "incarnation": hello.incarnation if hello else None,
            "topic": hello.topic if hello else None,
            "endpoints": hello.endpoints if hello else None,
            "kv_read": hello.kv_read if hello else "",
            "kv_layout": hello.kv_layout if hello else "",
            "role": self.config.engine.role,
            "open_requests": self.metrics.open_requests,
            "load": msgspec.structs.asdict(stats.load),
            "pool": msgspec.structs.asdict(stats.pool),
            "rates": msgspec.structs.asdict(stats.rates),
        }
        return json_response(load)

    async def expose_metrics(self, _: Request) -> Response:
        return Response(self.metrics.text(), media_type=CONTENT_TYPE)

    async def version(self, _: Request) -> Response:
        return json_response({"version": version("warmroute")})

    async def docs(self, _: Request) -> Response:
        return await documents.docs(TITLE)

    async def docs_file(self, request: Request) -> Response:
        return await documents.file(request.path_params["file"], request.scope["path"])

    async def openapi(self, _: Request) -> Response:
        return await documents.openapi(partial(document, ROUTES, (self.model, *self.adapters)))


# ---- routes


def _route(
    methods: tuple[str, ...], path: str, who: Role, endpoint: Any, request: Any = None, answer: Any = None, **more: Any
) -> Documented:
    return Documented(methods, path, who, endpoint, request=request, answer=answer, **more)


GET, POST, DELETE, PAGE = ("GET",), ("POST",), ("DELETE",), ("GET", "HEAD")
ANYONE, CLIENT = Role.ANYONE, Role.CLIENT
# Who may ask for what, where there is a key. Routers have it, and whoever has it may do here what they do.
ROUTES = (
    _route(POST, "/v1/completions", CLIENT, Endpoints.completions, CompletionRequest, Completion),
    _route(POST, "/v1/chat/completions", CLIENT, Endpoints.chat_completions, ChatRequest, ChatCompletion),
    _route(POST, "/v1/messages", CLIENT, Endpoints.messages, MessagesRequest, MessageAnswer),
    _route(POST, "/v1/messages/count_tokens", CLIENT, Endpoints.count_message_tokens, CountTokensRequest, TokenCount),
    _route(POST, "/v1/responses", CLIENT, Endpoints.responses, ResponsesRequest, ResponseAnswer),
    _route(GET, ONE_RESPONSE, CLIENT, Endpoints.response, answer=ResponseAnswer),
    _route(DELETE, ONE_RESPONSE, CLIENT, Endpoints.delete_response, answer=DeletedResponse),
    _route(GET, f"{ONE_RESPONSE}/conversation", CLIENT, Endpoints.response_conversation, in_document=False),
    _route(GET, "/v1/models", CLIENT, Endpoints.models, answer=ModelList),
    _route(GET, ONE_MODEL, CLIENT, Endpoints.model_named, answer=Model, encoded_slashes=True),
    _route(POST, "/tokenize", CLIENT, Endpoints.tokenize, TokenizeRequest, Tokens),
    _route(POST, "/detokenize", CLIENT, Endpoints.detokenize, DetokenizeRequest, DetokenizedPrompt),
    _route(GET, "/tokenizer_info", CLIENT, Endpoints.tokenizer_info),
    _route(POST, "/reset_prefix_cache", CLIENT, Endpoints.reset_prefix_cache),
    _route(GET, "/health", ANYONE, Endpoints.health),
    _route(GET, "/ready", ANYONE, Endpoints.ready),
    _route(GET, "/metrics", ANYONE, Endpoints.expose_metrics),
    _route(GET, "/load", CLIENT, Endpoints.load),
    _route(GET, "/version", CLIENT, Endpoints.version),
    _route(PAGE, "/docs", CLIENT, Endpoints.docs, in_document=False),
    _route(PAGE, documents.FILES, ANYONE, Endpoints.docs_file, in_document=False),
    _route(PAGE, documents.OPENAPI, CLIENT, Endpoints.openapi, in_document=False),
)
TABLE = RouteTable(ROUTES)


class ReplicaKey:
    """Asks for `Authorization: Bearer KEY` or `x-api-key: KEY` everywhere but where anyone may ask."""

    def __init__(self, key: str | None) -> None:
        self._key = None if key is None else key.encode()

    def admit(self, scope: Scope, asked: RouteMatch) -> None:
        if self._key is not None and asked.who is not ANYONE:
            given = shown_key(scope["headers"])
            if given is None or not hmac.compare_digest(given, self._key):
                raise unauthorized()


def build_app(engine: EngineClient, prompts: Prompts, config: ReplicaConfig) -> Starlette:
    endpoints = Endpoints(engine, prompts, config)
    advice = "let them ask a router, started with --cors-origin ORIGIN"
    gate = Middleware(Gate, table=TABLE, admit=ReplicaKey(config.api_key).admit, advice=advice)
    app = Starlette(
        routes=served(ROUTES, endpoints), middleware=[gate], exception_handlers=error_answers(endpoints.metrics)
    )
    app.router.redirect_slashes = False
    app.state.endpoints = endpoints
    return app
