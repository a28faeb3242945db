"""The replica's OpenAPI document."""

import copy
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from api import schema
from api.generation_apis import PATHS
from api.http.documents import Operation, described
from api.http.routes import Route
from api.messages.requests import CountTokensRequest, MessagesRequest
from api.native import FRAMES_TYPE
from api.openai.requests import ChatRequest, CompletionRequest
from api.openai_responses.requests import ResponsesRequest
from api.responses import CONTENT_TYPE as SSE_TYPE

TITLE = "warmroute replica"
ONE_MODEL = "/v1/models/{model:path}"
ONE_RESPONSE = "/v1/responses/{response_id}"

ERRORS = {
    400: "The request cannot be understood, or asks for what cannot be given",
    401: "The API key is missing or wrong",
    404: "The model is not served here",
    409: "The cache is in use",
    413: "The body is too long",
    429: "Too many requests wait; Retry-After says when to try again",
    500: "The server failed",
    503: "Loading, draining, or the engine stopped",
}
_MODEL_IN_PATH = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
_METRICS = {"responses": {"200": {"description": "Prometheus text", "content": {"text/plain": {}}}}}


class Documented(Route, frozen=True, eq=False, kw_only=True):
    request: Any = None
    answer: Any = None


def operation(route: Documented) -> dict[str, Any]:
    if route.template == "/metrics":
        return _METRICS
    found = schema.operation(route.request, route.answer)
    error = found["responses"]["default"]["content"]
    for status, description in ERRORS.items():
        found["responses"][str(status)] = {"description": description, "content": error}
    if route.template in PATHS:
        found["responses"]["200"]["content"] |= {SSE_TYPE: {}, FRAMES_TYPE: {}}
    if route.template == ONE_MODEL:
        found["parameters"] = [_MODEL_IN_PATH]
    if route.template.startswith(ONE_RESPONSE):
        found["parameters"] = [_MODEL_IN_PATH | {"name": "response_id"}]
    return found


@lru_cache(4)
def document(routes: Iterable[Documented], models: tuple[str, ...]) -> dict[str, Any]:
    """The whole document, made once for the same names of models."""
    shown = [route for route in routes if route.in_document]
    made = described(
        TITLE,
        [
            Operation(method, each.template, each.endpoint.__name__, operation(each))
            for each in shown
            for method in each.methods
        ],
    )
    schemas = copy.deepcopy(schema.components())
    for request in (CompletionRequest, ChatRequest, MessagesRequest, CountTokensRequest, ResponsesRequest):
        schemas[request.__name__]["properties"]["model"] = {"enum": list(models)}
    made.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
    return made
