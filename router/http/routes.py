"""The router's table of routes: each one's role, and its handler or type. Other routes are not served.

What is passed on is named one by one. Engines add routes that change them, also below /v1: one that nobody has looked
at is for administrators (decision 0022).
"""

from collections.abc import Iterable
from typing import Any

from api.generation_apis import CHAT, COMPLETIONS
from api.http.documents import FILES, OPENAPI
from api.http.routes import Role, Route, RouteTable
from router.http.endpoints import Endpoints
from router.proxy.flow import RequestType

GET, POST, DELETE = ("GET",), ("POST",), ("DELETE",)
PAGE = ("GET", "HEAD")
ANY = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")
ANYONE, CLIENT, READER, ADMINISTRATOR = Role

# The types of requests that replicas answer.
CHAT_COMPLETION, COMPLETION = (RequestType(api.name, generation=api) for api in (CHAT, COMPLETIONS))
MESSAGES, RESPONSES = RequestType("messages", caches=True), RequestType("responses", caches=True)
# A body that may be a prompt must be JSON if the key has a cache salt. Engines keep the KV of what they embed, score or
# classify too: how long that takes tells what others have sent.
COMPUTES = RequestType(caches=True, only_computes=True)
UNKNOWN = RequestType(caches=True)  # its effects are not known, so it goes to one replica
OF_RESPONSE = RequestType(caches=True, of_response=True)
OF_MODEL = RequestType(only_computes=True, query_names_model=True)
WITHOUT_CACHE = RequestType(only_computes=True)  # a body of any kind


def _route(methods: tuple[str, ...], template: str, who: Role, endpoint: Any, **more: bool) -> Route:
    return Route(methods=methods, template=template, who=who, endpoint=endpoint, **more)


# Past the app (`front.py`): what replicas answer.
DIRECT_ROUTES = (
    _route(POST, "/v1/chat/completions", CLIENT, CHAT_COMPLETION),
    _route(POST, "/v1/completions", CLIENT, COMPLETION),
    _route(POST, "/tokenize", CLIENT, WITHOUT_CACHE),
    _route(POST, "/detokenize", CLIENT, WITHOUT_CACHE),
    _route(GET, "/tokenizer_info", CLIENT, OF_MODEL),
    _route(POST, "/classify", CLIENT, COMPUTES),
    _route(POST, "/inference/v1/generate", CLIENT, COMPUTES),
    _route(POST, "/pooling", CLIENT, COMPUTES),
    _route(POST, "/rerank", CLIENT, COMPUTES),
    _route(POST, "/score", CLIENT, COMPUTES),
    _route(POST, "/v1/audio/speech", CLIENT, WITHOUT_CACHE),
    _route(POST, "/v1/audio/transcriptions", CLIENT, WITHOUT_CACHE),
    _route(POST, "/v1/audio/translations", CLIENT, WITHOUT_CACHE),
    _route(POST, "/v1/chat/completions/render", CLIENT, COMPUTES),
    _route(POST, "/v1/classify", CLIENT, COMPUTES),
    _route(POST, "/v1/completions/render", CLIENT, COMPUTES),
    _route(POST, "/v1/detokenize", CLIENT, WITHOUT_CACHE),
    _route(POST, "/v1/embeddings", CLIENT, COMPUTES),
    _route(POST, "/v1/images/edits", CLIENT, COMPUTES),
    _route(POST, "/v1/images/generations", CLIENT, COMPUTES),
    _route(POST, "/v1/messages", CLIENT, MESSAGES),
    _route(POST, "/v1/messages/count_tokens", CLIENT, COMPUTES),
    _route(POST, "/v1/pooling", CLIENT, COMPUTES),
    _route(POST, "/v1/rerank", CLIENT, COMPUTES),
    _route(POST, "/v1/responses", CLIENT, RESPONSES),
    _route(GET, "/v1/responses/{response_id}", CLIENT, OF_RESPONSE),
    _route(DELETE, "/v1/responses/{response_id}", CLIENT, OF_RESPONSE),
    _route(POST, "/v1/responses/{response_id}/cancel", CLIENT, OF_RESPONSE),
    _route(POST, "/v1/score", CLIENT, COMPUTES),
    _route(POST, "/v1/tokenize", CLIENT, WITHOUT_CACHE),
    _route(POST, "/v2/rerank", CLIENT, COMPUTES),
)
# Of templates that fit the first one counts: this one is the last.
OTHERS = _route(ANY, "/v1/{rest:path}", ADMINISTRATOR, UNKNOWN)

APP_ROUTES = (
    _route(GET, "/v1/models", CLIENT, Endpoints.models),
    _route(GET, "/v1/models/{model:path}", CLIENT, Endpoints.model_named, encoded_slashes=True),
    _route(PAGE, "/", ANYONE, Endpoints.root, in_document=False),
    _route(GET, "/health", ANYONE, Endpoints.health),
    _route(GET, "/ready", ANYONE, Endpoints.ready),
    _route(GET, "/metrics", ANYONE, Endpoints.metrics),
    _route(GET, "/version", CLIENT, Endpoints.version),
    _route(GET, "/usage", READER, Endpoints.usage),
    _route(GET, "/replicas", READER, Endpoints.replicas),
    _route(POST, "/replicas", ADMINISTRATOR, Endpoints.add_replica),
    _route(DELETE, "/replicas/{name}", ADMINISTRATOR, Endpoints.remove_replica),
    _route(POST, "/replicas/{name}/drain", ADMINISTRATOR, Endpoints.drain),
    _route(POST, "/replicas/{name}/undrain", ADMINISTRATOR, Endpoints.undrain),
    _route(POST, "/replicas/{name}/resync", ADMINISTRATOR, Endpoints.resync),
    _route(POST, "/v1/load_lora_adapter", ADMINISTRATOR, Endpoints.load_adapter),
    _route(POST, "/v1/unload_lora_adapter", ADMINISTRATOR, Endpoints.unload_adapter),
    _route(POST, "/reset_prefix_cache", ADMINISTRATOR, Endpoints.reset_caches),
    _route(POST, "/explain", ADMINISTRATOR, Endpoints.explain),
    _route(GET, "/decisions", ADMINISTRATOR, Endpoints.decisions),
    _route(GET, "/decisions/{request_id:path}", ADMINISTRATOR, Endpoints.decision, encoded_slashes=True),
    _route(GET, "/sessions", ADMINISTRATOR, Endpoints.sessions),
    _route(GET, "/prefixes", ADMINISTRATOR, Endpoints.prefixes),
    _route(GET, "/debug/index", ADMINISTRATOR, Endpoints.debug_index),
    _route(GET, "/dashboard/replicas/{name}", READER, Endpoints.dashboard_replica),
    # Made for one page.
    _route(GET, "/dashboard/fleet", READER, Endpoints.dashboard_fleet, in_document=False),
    _route(GET, "/dashboard/history", READER, Endpoints.dashboard_history, in_document=False),
    # The dashboard's files tell nothing: what they show is asked for by the routes above.
    _route(PAGE, "/dashboard", ANYONE, Endpoints.dashboard_index, in_document=False),
    _route(PAGE, "/dashboard/", ANYONE, Endpoints.dashboard_without_slash, in_document=False),
    _route(PAGE, "/dashboard/{path:path}", ANYONE, Endpoints.dashboard_file, in_document=False),
    _route(PAGE, "/docs", CLIENT, Endpoints.docs, in_document=False),
    _route(PAGE, FILES, ANYONE, Endpoints.docs_file, in_document=False),
    _route(PAGE, OPENAPI, CLIENT, Endpoints.openapi, in_document=False),
)
FORWARDED = (*DIRECT_ROUTES, OTHERS)
ROUTES = (*DIRECT_ROUTES, *APP_ROUTES, OTHERS)
TABLE = RouteTable(ROUTES)


def named(client_paths: Iterable[str]) -> tuple[Route, ...]:
    """Further routes that clients may use; paths in the table keep their own row."""
    known = {route.template for route in ROUTES}
    return tuple(_route(ANY, path, CLIENT, UNKNOWN) for path in sorted({*client_paths} - known))
