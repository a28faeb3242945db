"""The OpenAPI document of all routes, including those that bypass the app."""

import copy
from collections.abc import Iterable
from typing import Any

from msgspec import Struct

from api import schema
from api.generation_apis import APIS, PATHS
from api.http.documents import Operation, described
from api.http.routes import Route
from api.messages.answers import MessageAnswer, TokenCount
from api.messages.requests import CountTokensRequest, MessagesRequest
from api.openai.engine_requests import DetokenizeRequest, RetainRequest, TokenizeRequest
from api.openai.requests import ChatRequest, CompletionRequest
from api.openai_responses.answers import ResponseAnswer
from api.openai_responses.requests import ResponsesRequest
from api.responses import CONTENT_TYPE as SSE_TYPE
from api.responses import ChatCompletion, Completion, DetokenizedPrompt, Error, Model, ModelList, Tokens

TITLE = "warmroute router"
# What replicas answer: the app never sees these requests (`front.py`).
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
_ANY: dict[str, Any] = {"application/json": {}}
_TEXT = {"type": "string"}
_LIMIT = {"name": "limit", "in": "query", "required": False, "schema": {"type": "integer", "minimum": 1}}
_API = {"name": "api", "in": "query", "required": False, "schema": {"enum": [*APIS]}}
_ADAPTER = {"type": "object", "properties": {"lora_name": _TEXT, "lora_path": _TEXT}, "required": ["lora_name"]}
_REPLICA = {"type": "object", "properties": {"url": _TEXT, "name": _TEXT}, "required": ["url"]}


def direct(path: str) -> dict[str, Any]:
    """The operation of a route that bypasses the app."""
    request, answer = DIRECT[path]
    found = _with_errors(schema.operation(request, answer))
    if path in PATHS:
        found["responses"]["200"]["content"] |= {SSE_TYPE: {}}
    return found


def control(method: str, path: str) -> dict[str, Any]:
    """The operation of a route of the app."""
    match method, path:
        case _, "/v1/models":
            found = schema.operation(None, ModelList)
        case _, "/v1/models/{model:path}":
            found = schema.operation(None, Model) | {"parameters": [_in_path("model")]}
        case _, "/metrics":
            found = _answers("Prometheus text", {"text/plain": {}})
        case _, "/usage":
            content: dict[str, Any] = {"application/json": {}, "text/csv": {}}
            found = _answers("By day, key and model, or by some of these", content)
            names = ("from", "to", "key", "model", "by", "format")
            given = [{"name": name, "in": "query", "required": False, "schema": _TEXT} for name in names]
            found["parameters"] = [*given, _LIMIT]
        case "POST", "/replicas":
            found = _answers("Added", _ANY, 201) | {"requestBody": _body(_REPLICA)}
        case _, "/v1/load_lora_adapter" | "/v1/unload_lora_adapter":
            found = _answers("Which replicas have it", _ANY) | {"requestBody": _body(_ADAPTER)}
        case _, "/reset_prefix_cache":
            found = _answers("Which replicas have cleared their caches", _ANY)
        case "POST", "/retain":
            asked: dict[str, Any] = schema.reference(RetainRequest)
            found = _answers("Which replicas retain it", _ANY) | {"requestBody": _body(asked)}
        case "GET", "/retain":
            found = _answers("What is retained, the last used first", _ANY)
        case _, "/retain/{id}":
            found = _answers("It has ended", _ANY) | {"parameters": [_in_path("id")]}
        case _, "/explain":
            asked = {"anyOf": [schema.reference(api.request_type) for api in APIS.values()]}
            found = _answers("What would be decided", _ANY) | {"requestBody": _body(asked), "parameters": [_API]}
        case _, "/decisions":
            found = _answers("The newest first", _ANY) | {"parameters": [_LIMIT]}
        case _, "/decisions/{request_id:path}":
            found = _answers("One of them", _ANY) | {"parameters": [_in_path("request_id")]}
        case _, "/prefixes":
            found = _answers("What saves most first", _ANY) | {"parameters": [_LIMIT]}
        case _:
            found = _answers("Done", _ANY)
            if "{name}" in path:
                found["parameters"] = [_in_path("name")]
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


def _answers(description: str, content: dict[str, Any], status: int = 200) -> dict[str, Any]:
    return {"responses": {str(status): {"description": description, "content": content}}}


def _body(asked: dict[str, Any]) -> dict[str, Any]:
    return {"required": True, "content": {"application/json": {"schema": asked}}}


def _in_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": _TEXT}
