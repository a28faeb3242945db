"""The parsed parts of an engine's stream: its events, and their choices."""

from typing import Any

import msgspec
from msgspec import Struct


class Choice(Struct):
    index: int = 0
    text: str | None = None
    delta: dict[str, Any] | None = None
    logprobs: Any = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None

    @property
    def said(self) -> str:
        return (self.text if self.delta is None else self.delta.get("content")) or ""

    @property
    def role(self) -> bool:
        return self.delta is not None and self.delta.get("role") is not None


class Chunk(Struct):
    id: str = ""
    created: int = 0
    model: str = ""
    choices: list[Choice] = []
    usage: dict[str, Any] | None = None
    prompt_token_ids: list[int] | None = None
    error: Any = None


decode_chunk = msgspec.json.Decoder(Chunk).decode


def is_silent(chunk: Chunk, *, role_is_news: bool = True) -> bool:
    """Return whether the event is there only for its token ids."""
    if chunk.usage is not None or not chunk.choices:
        return False
    return all(
        choice.finish_reason is None
        and not choice.logprobs
        and not (choice.role and role_is_news)
        and not any(value for name, value in (choice.delta or {}).items() if name != "role")
        and not choice.text
        for choice in chunk.choices
    )
