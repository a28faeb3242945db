"""Responses of the Messages API, whole and as events."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

from msgspec import Raw, Struct

from api.responses import encode
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
    output_tokens: int


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


class ThinkingContent(Struct, tag="thinking"):
    thinking: str
    signature: str


class ToolUseContent(Struct, tag="tool_use"):
    id: str
    name: str
    input: Raw


Content: TypeAlias = TextContent | ThinkingContent | ToolUseContent


class MessageAnswer(Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Content]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(Struct):
    input_tokens: int


# ---- events


class MessageStart(Struct, tag="message_start"):
    message: MessageAnswer


class ContentBlockStart(Struct, tag="content_block_start"):
    index: int
    content_block: Content


class TextDelta(Struct, tag="text_delta"):
    text: str


class ThinkingDelta(Struct, tag="thinking_delta"):
    thinking: str


class SignatureDelta(Struct, tag="signature_delta"):
    signature: str


class InputJsonDelta(Struct, tag="input_json_delta"):
    partial_json: str


class ContentBlockDelta(Struct, tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class ContentBlockStop(Struct, tag="content_block_stop"):
    index: int


class Ending(Struct):
    stop_reason: StopReason
    stop_sequence: str | None = None


class OutputUsage(Struct):
    """The rest of the usage, which is said when the message starts."""

    output_tokens: int


class MessageDelta(Struct, tag="message_delta"):
    delta: Ending
    usage: OutputUsage


class MessageStop(Struct, tag="message_stop"):
    pass


Event: TypeAlias = MessageStart | ContentBlockStart | ContentBlockDelta | ContentBlockStop | MessageDelta | MessageStop


def event_bytes(event: Event) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (str(type(event).__struct_config__.tag).encode(), encode(event))


LAST_EVENT = event_bytes(MessageStop())
