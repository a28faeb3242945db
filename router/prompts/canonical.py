"""The conversation in a request of an API that only engines speak, as the text that approximate blocks are made of.

Equal beginnings of conversations are equal texts, whichever API they come by, and whatever stands around them.
"""

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Raw, Struct

from router.prompts.prompt import UNREADABLE, Peek, PeekMessage

MOST_TEXT_BYTES = 1024 * 1024  # of a body that is not taken apart: a replica is taken to hold four times as much


class _Asked(Struct):
    system: Any = None
    messages: Any = None
    instructions: Any = None
    input: Any = None
    tools: Raw = Raw(b"")
    stream: Any = None
    cache_salt: Any = None
    prompt_cache_key: Any = None


_decode = msgspec.json.Decoder(_Asked).decode


def peek_of(api: str, body: bytes, model: str) -> Peek | None:
    """The request that a replica gets as a chat, for matching and for people; None if it is no conversation."""
    try:
        asked = _decode(body)
    except UNREADABLE:
        return None
    if api == "batch":
        conversations = asked.messages
        messages = conversations[0] if isinstance(conversations, list) and conversations else None
    elif api == "responses":
        messages = [*_system(asked.instructions), *_list(asked.input)]
    else:
        messages = [*_system(asked.system), *_list(asked.messages)]
    if not isinstance(messages, list) or not messages:
        return None
    made = []
    for item in messages:
        content = item.get("content") if isinstance(item, dict) else item
        role = item.get("role") or item.get("type") if isinstance(item, dict) else None
        made.append(PeekMessage(role, item if content is None else content))
    salt, key = (given if isinstance(given, str) else None for given in (asked.cache_salt, asked.prompt_cache_key))
    return Peek(model, made, tools=asked.tools, stream=asked.stream is True, cache_salt=salt, prompt_cache_key=key)


def _system(content: Any) -> Iterable[dict[str, Any]]:
    return [{"role": "system", "content": content}] if content else []


def _list(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    return content if isinstance(content, list) else []
