"""ChatML for the byte tokenizer, as segments, so that a client's text never becomes a special token."""

import json
from collections.abc import Iterable
from typing import Any, TypeAlias

from api.prompts.templates import Conversation
from api.tokens.tokenizer import ByteTokenizer

Segment: TypeAlias = str | int  # text, or the id of a special token

_START, _END = ByteTokenizer.im_start, ByteTokenizer.im_end


def segments(conversation: Conversation) -> list[Segment]:
    found: list[Segment] = []
    if conversation.tools:
        found += _turn("system", "\n".join(map(_json, conversation.tools)))
    for message in conversation.messages:
        calls = [_json(call) for call in message.get("tool_calls") or ()]
        content = message.get("content", "")
        found += _turn(message["role"], "\n".join([content, *calls]) if calls else content)
    if conversation.add_generation_prompt:
        found += (_START, "assistant\n")
    return found[:-2] if conversation.continue_final_message else found


def _turn(role: str, text: str) -> tuple[Segment, ...]:
    return (_START, f"{role}\n{text}", _END, "\n")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def size(segment: Segment) -> int:
    return 1 if isinstance(segment, int) else len(segment.encode())


def encode(shown: Iterable[Segment]) -> list[int]:
    token_ids: list[int] = []
    for segment in shown:
        if isinstance(segment, int):
            token_ids.append(segment)
        else:
            token_ids += segment.encode()
    return token_ids


def text(shown: Iterable[Segment]) -> str:
    """The segments as text for people; a special token looks like its text."""
    return "".join(ByteTokenizer.specials[segment - 256] if isinstance(segment, int) else segment for segment in shown)
