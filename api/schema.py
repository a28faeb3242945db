"""OpenAPI 3.1 schemas of the request and response types. Rules of several fields are not in them: `read` has those."""

from functools import cache
from typing import Any

import msgspec
from msgspec import Struct

from api.messages.answers import MessageAnswer, TokenCount
from api.messages.requests import CountTokensRequest, MessagesRequest
from api.openai.engine_requests import (
    DetokenizeRequest,
    LoadAdapterRequest,
    RetainRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from api.openai.requests import UNSUPPORTED, ChatRequest, CompletionRequest
from api.openai_responses.answers import DeletedResponse, ResponseAnswer
from api.openai_responses.requests import UNSUPPORTED as UNSUPPORTED_OF_RESPONSES
from api.openai_responses.requests import ResponsesRequest
from api.responses import ChatCompletion, Completion, DetokenizedPrompt, Error, ModelList, RetainedPrefix, Tokens

REQUESTS: tuple[type[Struct], ...] = (
    CompletionRequest,
    ChatRequest,
    MessagesRequest,
    CountTokensRequest,
    ResponsesRequest,
    TokenizeRequest,
    RetainRequest,
    DetokenizeRequest,
    LoadAdapterRequest,
    UnloadAdapterRequest,
)
ANSWERS: tuple[type[Struct], ...] = (
    Completion,
    ChatCompletion,
    MessageAnswer,
    TokenCount,
    ResponseAnswer,
    DeletedResponse,
    Tokens,
    RetainedPrefix,
    DetokenizedPrompt,
    ModelList,
    Error,
)

REFUSED = {
    CompletionRequest: UNSUPPORTED,
    ChatRequest: UNSUPPORTED,
    ResponsesRequest: UNSUPPORTED_OF_RESPONSES,
}


@cache
def components() -> dict[str, Any]:
    """The schemas for `components.schemas` of the OpenAPI document, without fields that are decoded to be refused."""
    _, schemas = msgspec.json.schema_components((*REQUESTS, *ANSWERS), ref_template="#/components/schemas/{name}")
    for request_type, unsupported in REFUSED.items():
        for name in unsupported:
            del schemas[request_type.__name__]["properties"][name]
    return schemas


def reference(type_: type[Struct]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{type_.__name__}"}


def operation(request_type: type[Struct] | None, answer_type: type[Struct] | None) -> dict[str, Any]:
    """The request body and response of an operation in a document."""
    extra: dict[str, Any] = {"responses": {"default": _answer("An error", Error)}}
    if request_type is not None:
        extra["requestBody"] = {"required": True, "content": _json(request_type)}
    if answer_type is not None:
        extra["responses"]["200"] = _answer("Done", answer_type)
    return extra


def _answer(description: str, type_: type[Struct]) -> dict[str, Any]:
    return {"description": description, "content": _json(type_)}


def _json(type_: type[Struct]) -> dict[str, Any]:
    return {"application/json": {"schema": reference(type_)}}
