"""Responses of the Messages API, and its errors."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

from msgspec import Raw, Struct, field

from api.errors import ApiError, encodable
from api.responses import encode, named_event
from api.retention import TTL_S, Retain

StopReason: TypeAlias = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class CacheCreation(Struct, kw_only=True):
    ephemeral_5m_input_tokens: int = 0
    ephemeral_1h_input_tokens: int = 0


class MessageUsage(Struct, kw_only=True):
    """`input_tokens` leaves out the prompt's tokens that were read from the cache, or written for `cache_control`."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    cache_creation: CacheCreation
    inference_geo: None = None
    output_tokens: int
    output_tokens_details: None = None
    server_tool_use: None = None
    service_tier: Literal["standard"] = "standard"


def usage(prompt_tokens: int, output_tokens: int, cached_tokens: int, retained: Sequence[Retain] = ()) -> MessageUsage:
    """The usage of a prompt of which these beginnings, each longer than the one before, are kept in the cache."""
    written = CacheCreation()
    end = cached_tokens
    for beginning in retained:
        tokens = max(0, beginning.tokens - end)
        end += tokens
        if beginning.ttl_s >= TTL_S["1h"]:
            written.ephemeral_1h_input_tokens += tokens
        else:
            written.ephemeral_5m_input_tokens += tokens
    return MessageUsage(
        input_tokens=prompt_tokens - end,
        cache_creation_input_tokens=end - cached_tokens,
        cache_read_input_tokens=cached_tokens,
        cache_creation=written,
        output_tokens=output_tokens,
    )


class TextContent(Struct, tag="text"):
    text: str
    citations: None = None


class ThinkingContent(Struct, tag="thinking"):
    thinking: str
    signature: str


class ToolUseContent(Struct, tag="tool_use"):
    id: str
    name: str
    input: Raw
    caller: dict[str, str] = field(default_factory=lambda: {"type": "direct"})


Content: TypeAlias = TextContent | ThinkingContent | ToolUseContent


class MessageAnswer(Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Content]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    stop_details: None = None
    container: None = None
    usage: MessageUsage


class TokenCount(Struct):
    input_tokens: int


LAST_EVENT = named_event("message_stop", {})

# Clients of agents look for these words to shorten the conversation.
TOO_LONG = "prompt is too long"
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(error: ApiError) -> bytes:
    """The body; `param` and `code` are additions, which routers read."""
    message = error.message
    if error.code == "context_length_exceeded" and not message.startswith(TOO_LONG):
        message = f"{TOO_LONG}: {message}"
    kind = _ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    details = {"type": kind, "message": message, "param": error.param, "code": error.code}
    return encode({"type": "error", "error": {name: value and encodable(value) for name, value in details.items()}})


def error_event(error: ApiError) -> bytes:
    return b"event: error\ndata: %b\n\n" % error_body(error)
