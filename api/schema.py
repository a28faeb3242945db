"""OpenAPI 3.1 schemas of the request and response types, as strict as `read` where a schema can be."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec
from msgspec import Struct

from api.messages.answers import MessageAnswer, TokenCount
from api.messages.requests import CountTokensRequest, MessagesRequest
from api.openai.engine_requests import DetokenizeRequest, TokenizeRequest
from api.openai.requests import MAX_PROMPTS, UNSUPPORTED, ChatRequest, CompletionRequest, Tool
from api.openai_responses.answers import DeletedResponse, ResponseAnswer
from api.openai_responses.requests import UNSUPPORTED as UNSUPPORTED_OF_RESPONSES
from api.openai_responses.requests import ResponsesRequest
from api.responses import ChatCompletion, Completion, DetokenizedPrompt, Error, ModelList, Tokens

REQUESTS: tuple[type[Struct], ...] = (
    CompletionRequest,
    ChatRequest,
    MessagesRequest,
    CountTokensRequest,
    ResponsesRequest,
    TokenizeRequest,
    DetokenizeRequest,
)
ANSWERS: tuple[type[Struct], ...] = (
    Completion,
    ChatCompletion,
    MessageAnswer,
    TokenCount,
    ResponseAnswer,
    DeletedResponse,
    Tokens,
    DetokenizedPrompt,
    ModelList,
    Error,
)


def reference(type_: type[Struct]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{type_.__name__}"}


def operation(request_type: type[Struct] | None, answer_type: type[Struct] | None) -> dict[str, Any]:
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


@cache
def components() -> dict[str, Any]:
    """The schemas for `components.schemas` of the OpenAPI document."""
    _, schemas = msgspec.json.schema_components((*REQUESTS, *ANSWERS, Tool), ref_template="#/components/schemas/{name}")
    for request_type in (CompletionRequest, ChatRequest):
        properties = schemas[request_type.__name__]["properties"]
        for name, neutral in UNSUPPORTED.items():
            properties[name] = {"enum": [None, *neutral], "default": None}
        [bias, _] = properties["logit_bias"]["anyOf"]
        # Keys are strings in JSON: a pattern limits their digits, `read` their value.
        bias["propertyNames"] = {"pattern": "^(-?0|[1-9][0-9]{0,9})$"}
        limits = [_when(("stream_options", "object"), stream=True), _NO_STREAM_OF_PROMPTS]
        schemas[request_type.__name__]["allOf"] = limits
    for name in (ChatRequest.__name__, TokenizeRequest.__name__):
        schemas[name]["properties"]["tools"] |= {"anyOf": _TOOLS}
    schemas["CompletionRequest"]["properties"]["prompt"] = _PROMPT
    schemas["CompletionRequest"]["allOf"] += [_ONLY_ECHO, _NO_STREAM_OF_ECHOES]
    schemas["ChatRequest"]["properties"]["echo"] = {"enum": [None, False], "default": None}
    schemas["ChatRequest"]["allOf"] += [_ONE_ENDING, _when(("top_logprobs", "integer"), logprobs=True)]
    schemas["TokenizeRequest"] |= {"oneOf": [_given("prompt", "messages"), _given("messages", "prompt")]}
    schemas["TokenizeRequest"]["allOf"] = [_ONE_ENDING]
    schemas["Message"] |= {
        "anyOf": [_has("role", {"const": "assistant"}), _has("content", {"type": ["string", "array"]})]
    }
    for name, neutral in UNSUPPORTED_OF_RESPONSES.items():
        schemas["ResponsesRequest"]["properties"][name] = {"enum": [None, *neutral], "default": None}
    schemas["NamedTool"] |= {
        "if": _has("type", {"const": "allowed_tools"}),
        "then": _has("allowed_tools", {"type": "object"}),
        "else": _has("function", {"type": "object"}),
    }
    return schemas


def _has(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"properties": {name: schema}, "required": [name]}


def _when(given: tuple[str, str], **needed: bool) -> dict[str, Any]:
    """A rule: if a field has this type, another one must have this value."""
    [(name, value)] = needed.items()
    return {"if": _has(given[0], {"type": given[1]}), "then": _has(name, {"const": value})}


def _given(name: str, other: str) -> dict[str, Any]:
    """A rule: one field is present, and the other is absent or null."""
    return _has(name, {"not": {"type": "null"}}) | {"not": _has(other, {"not": {"type": "null"}})}


def _array(items: Mapping[str, Any], **limits: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1, **limits}


_TOKEN_ID = {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}
_PROMPT = {
    "anyOf": [
        {"type": "string"},
        _array({"type": "string"}, maxItems=MAX_PROMPTS),
        _array(_TOKEN_ID),
        _array(_array(_TOKEN_ID), maxItems=MAX_PROMPTS),
    ]
}
_TOOLS = [{"type": "array", "items": reference(Tool)}, {"type": "null"}]
_NO_STREAM_OF_PROMPTS = {
    "not": {
        "properties": {"prompt_logprobs": {"type": "integer"}, "stream": {"const": True}},
        "required": ["prompt_logprobs", "stream"],
    }
}
_ONLY_ECHO = {"if": _has("max_tokens", {"const": 0}), "then": _has("echo", {"const": True})}
_NO_STREAM_OF_ECHOES = {
    "not": {
        "properties": {"echo": {"const": True}, "stream": {"const": True}, "logprobs": {"type": "integer"}},
        "required": ["echo", "stream", "logprobs"],
    }
}
# A conversation cannot both go on with its last message and begin a new one.
_ONE_ENDING = {
    "not": {
        "properties": {"continue_final_message": {"const": True}, "add_generation_prompt": {"const": True}},
        "required": ["continue_final_message", "add_generation_prompt"],
    }
}
