"""The content blocks of one message while its answer grows. One block is open at a time, the last one."""

import hashlib
import json
from collections.abc import Iterator

from msgspec import Raw

from api.messages.answers import (
    Content,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    Event,
    InputJsonDelta,
    SignatureDelta,
    TextContent,
    TextDelta,
    ThinkingContent,
    ThinkingDelta,
    ToolUseContent,
)
from api.parsing.parsed import Parsed

EMPTY = Raw(b"{}")


class Blocks:
    """Turns pieces of an answer into events, and keeps them for a whole message.

    `add` pieces in order, then `finish` once. Equal sequences of pieces give equal events, at any replica.
    """

    def __init__(self, message_id: str) -> None:
        self._message_id = message_id
        self._blocks: list[tuple[Content, list[str]]] = []  # each as it was opened, and its text
        self._open = False
        self._call: int | None = None  # the index of the open block's call

    @property
    def has_calls(self) -> bool:
        return any(isinstance(block, ToolUseContent) for block, _ in self._blocks)

    def add(self, parsed: Parsed) -> Iterator[Event]:
        if parsed.reasoning:
            yield from self._enter(ThinkingContent, ThinkingContent("", ""))
            yield self._grow(parsed.reasoning)
        if parsed.content:
            yield from self._enter(TextContent, TextContent(""))
            yield self._grow(parsed.content)
        for call in parsed.calls:
            if call.name is not None:
                yield from self._begin(ToolUseContent(call.id, call.name, EMPTY))
                self._call = call.index
            assert call.index == self._call, f"a piece of call {call.index} came after call {self._call} had begun"
            if call.arguments:
                yield self._grow(call.arguments)

    def finish(self) -> Iterator[Event]:
        if not self._open:
            return
        block, _ = self._blocks[-1]
        if isinstance(block, ThinkingContent):
            yield ContentBlockDelta(self._last, SignatureDelta(self._signature(self._last)))
        self._open, self._call = False, None
        yield ContentBlockStop(self._last)

    def content(self) -> list[Content]:
        """All blocks, whole."""
        return [self._whole(index) for index in range(len(self._blocks))]

    @property
    def _last(self) -> int:
        return len(self._blocks) - 1

    def _enter(self, kind: type[Content], block: Content) -> Iterator[Event]:
        """Open a block unless one of its kind is open."""
        if self._open and isinstance(self._blocks[-1][0], kind):
            return
        yield from self._begin(block)

    def _begin(self, block: Content) -> Iterator[Event]:
        yield from self.finish()
        self._blocks.append((block, []))
        self._open = True
        yield ContentBlockStart(self._last, block)

    def _grow(self, text: str) -> Event:
        block, texts = self._blocks[-1]
        texts.append(text)
        match block:
            case TextContent():
                return ContentBlockDelta(self._last, TextDelta(text))
            case ThinkingContent():
                return ContentBlockDelta(self._last, ThinkingDelta(text))
        return ContentBlockDelta(self._last, InputJsonDelta(text))

    def _whole(self, index: int) -> Content:
        block, texts = self._blocks[index]
        text = "".join(texts)
        match block:
            case TextContent():
                return TextContent(text)
            case ThinkingContent():
                return ThinkingContent(text, self._signature(index))
        assert isinstance(block, ToolUseContent)
        return ToolUseContent(block.id, block.name, _input(text))

    def _signature(self, index: int) -> str:
        """The signature that clients keep with thoughts. Nothing is checked with it; it is the same at any replica."""
        return hashlib.sha256(f"{self._message_id} {index}".encode()).hexdigest()


def _input(arguments: str) -> Raw:
    """The arguments of a call; an empty object if they break off, as at the end of max_tokens."""
    try:
        whole = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return EMPTY
    return Raw(arguments.encode()) if isinstance(whole, dict) and arguments else EMPTY
