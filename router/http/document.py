"""The OpenAPI document of all routes, including those that bypass the app."""

import copy
import re
from collections.abc import Callable, Iterable
from typing import Any

from msgspec import Struct

from api import schema
from api.generation_apis import APIS, PATHS
from api.http.documents import Operation, described
from api.http.routes import Route
from api.messages.answers import MessageAnswer, TokenCount
from api.messages.requests import CountTokensRequest, MessagesRequest
from api.openai.engine_requests import DetokenizeRequest, TokenizeRequest
from api.openai.requests import ChatRequest, CompletionRequest
from api.openai_responses.answers import ResponseAnswer
from api.openai_responses.requests import ResponsesRequest
from api.responses import CONTENT_TYPE as SSE_TYPE
from api.responses import ChatCompletion, Completion, DetokenizedPrompt, Error, Model, ModelList, Tokens

TITLE = "warmroute router"
# These are answers of replicas; the app never sees these requests (`front.py`).
DIRECT: dict[str, tuple[type[Struct], type[Struct]]] = {
    "/v1/chat/completions": (ChatRequest, ChatCompletion),
    "/v1/completions": (CompletionRequest, Completion),
    "/v1/messages": (MessagesRequest, MessageAnswer),
    "/v1/messages/count_tokens": (CountTokensRequest, TokenCount),
    "/v1/responses": (ResponsesRequest, ResponseAnswer),
    "/tokenize": (TokenizeRequest, Tokens),
    "/detokenize": (DetokenizeRequest, DetokenizedPrompt),
}
ERRORS = {
    400: "The request is invalid, or asks for something impossible",
    401: "The API key is missing or wrong",
    403: "Only an administrator may do this",
    404: "There is no such model, replica, decision or path",
    409: "Discovery names this replica: it would be back at once",
    413: "The body is too long",
    429: "The key's limit is reached, or every replica is at its own; Retry-After says when to try again",
    500: "The server failed",
    502: "The replica was lost while it answered",
    503: "No replica takes requests, or the router drains",
}
_JSON: dict[str, Any] = {"application/json": {}}
_TEXT = {"type": "string"}
_ADAPTER = {"type": "object", "properties": {"lora_name": _TEXT, "lora_path": _TEXT}, "required": ["lora_name"]}
_REPLICA = {"type": "object", "properties": {"url": _TEXT, "name": _TEXT}, "required": ["url"]}
CONTENT: dict[str, dict[str, Any]] = {"/metrics": {"text/plain": {}}, "/usage": {**_JSON, "text/csv": {}}}
MODELS: dict[str, type[Struct]] = {"/v1/models": ModelList, "/v1/models/{model:path}": Model}
TAKEN: dict[tuple[str, str], Callable[[], dict[str, Any]]] = {
    ("POST", "/replicas"): lambda: _REPLICA,
    ("POST", "/v1/load_lora_adapter"): lambda: _ADAPTER,
    ("POST", "/v1/unload_lora_adapter"): lambda: _ADAPTER,
    ("POST", "/explain"): lambda: {"anyOf": [schema.reference(api.request_type) for api in APIS.values()]},
}
_LIMIT = {"limit": {"type": "integer", "minimum": 1}}
QUERIES: dict[str, dict[str, Any]] = {
    "/usage": dict.fromkeys(("from", "to", "key", "model", "by", "format"), _TEXT) | _LIMIT,
    "/explain": {"api": {"enum": [*APIS]}},
    "/decisions": _LIMIT,
    "/prefixes": _LIMIT,
    "/sessions": _LIMIT,
}


def direct(path: str) -> dict[str, Any]:
    """The operation of a route that bypasses the app."""
    request, answer = DIRECT[path]
    found = _with_errors(schema.operation(request, answer))
    if path in PATHS:
        found["responses"]["200"]["content"] |= {SSE_TYPE: {}}
    return found


def control(method: str, path: str) -> dict[str, Any]:
    """The operation of a route of the app."""
    if (model := MODELS.get(path)) is not None:
        found = schema.operation(None, model)
    else:
        described = {"description": "Done", "content": CONTENT.get(path, _JSON)}
        found = {"responses": {"201" if (method, path) == ("POST", "/replicas") else "200": described}}
    if (taken := TAKEN.get((method, path))) is not None:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": taken()}}}
    in_path = [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in re.findall(r"{(\w+)", path)]
    in_query = [
        {"name": name, "in": "query", "required": False, "schema": kind} for name, kind in QUERIES.get(path, {}).items()
    ]
    if parameters := in_path + in_query:
        found["parameters"] = parameters
    return _with_errors(found)


def document(routes: Iterable[Route], models: Iterable[str]) -> dict[str, Any]:
    """The document of these routes and of those that bypass the app, with the names of the `models` served now."""
    shown = [route for route in routes if route.in_document]
    operations = [Operation("POST", path, path.rpartition("/")[2], direct(path)) for path in DIRECT]
    operations += [
        Operation(method, route.template, route.endpoint.__name__, control(method, route.template))
        for route in shown
        for method in route.methods
    ]
    found = described(TITLE, operations)
    schemas = copy.deepcopy(schema.components())
    named = list(models)
    for request, _ in DIRECT.values() if named else ():
        if "model" in schemas[request.__name__].get("required", ()):
            schemas[request.__name__]["properties"]["model"] = {"enum": named}
    found.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
    return found


def _with_errors(operation: dict[str, Any]) -> dict[str, Any]:
    error = {"application/json": {"schema": schema.reference(Error)}}
    for status, description in ERRORS.items():
        operation["responses"][str(status)] = {"description": description, "content": error}
    return operation
