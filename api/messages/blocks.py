"""The content blocks of one message while its answer grows. One block is open at a time, the last one."""

import hashlib
import json
from collections.abc import Iterator

from msgspec import Raw

from api.messages import answers
from api.parsing.parsed import Parsed

EMPTY = Raw(b"{}")


class Blocks:
    """Turns pieces of an answer into events, and keeps them for a whole message.

    `add` pieces in order, then `finish` once. Equal sequences of pieces give equal events, at any replica.
    """

    def __init__(self, message_id: str) -> None:
        self._message_id = message_id
        self._blocks: list[tuple[answers.Content, list[str]]] = []  # each as it was opened, and its text
        self._open = False
        self._call: int | None = None  # the index of the open block's call

    @property
    def has_calls(self) -> bool:
        return any(isinstance(block, answers.ToolUseContent) for block, _ in self._blocks)

    def add(self, parsed: Parsed) -> Iterator[answers.Event]:
        if parsed.reasoning:
            yield from self._enter(answers.ThinkingContent, answers.ThinkingContent("", ""))
            yield self._grow(parsed.reasoning)
        if parsed.content:
            yield from self._enter(answers.TextContent, answers.TextContent(""))
            yield self._grow(parsed.content)
        for call in parsed.calls:
            if call.name is not None:
                yield from self._begin(answers.ToolUseContent(call.id, call.name, EMPTY))
                self._call = call.index
            assert call.index == self._call, f"a piece of call {call.index} came after call {self._call} had begun"
            if call.arguments:
                yield self._grow(call.arguments)

    def finish(self) -> Iterator[answers.Event]:
        if not self._open:
            return
        block, _ = self._blocks[-1]
        if isinstance(block, answers.ThinkingContent):
            yield answers.ContentBlockDelta(self._last, answers.SignatureDelta(self._signature(self._last)))
        self._open, self._call = False, None
        yield answers.ContentBlockStop(self._last)

    def content(self) -> list[answers.Content]:
        """All blocks, whole."""
        return [self._whole(index) for index in range(len(self._blocks))]

    @property
    def _last(self) -> int:
        return len(self._blocks) - 1

    def _enter(self, kind: type[answers.Content], block: answers.Content) -> Iterator[answers.Event]:
        """Open a block unless one of its kind is open."""
        if self._open and isinstance(self._blocks[-1][0], kind):
            return
        yield from self._begin(block)

    def _begin(self, block: answers.Content) -> Iterator[answers.Event]:
        yield from self.finish()
        self._blocks.append((block, []))
        self._open = True
        yield answers.ContentBlockStart(self._last, block)

    def _grow(self, text: str) -> answers.Event:
        block, texts = self._blocks[-1]
        texts.append(text)
        match block:
            case answers.TextContent():
                return answers.ContentBlockDelta(self._last, answers.TextDelta(text))
            case answers.ThinkingContent():
                return answers.ContentBlockDelta(self._last, answers.ThinkingDelta(text))
        return answers.ContentBlockDelta(self._last, answers.InputJsonDelta(text))

    def _whole(self, index: int) -> answers.Content:
        block, texts = self._blocks[index]
        text = "".join(texts)
        match block:
            case answers.TextContent():
                return answers.TextContent(text)
            case answers.ThinkingContent():
                return answers.ThinkingContent(text, self._signature(index))
        assert isinstance(block, answers.ToolUseContent)
        return answers.ToolUseContent(block.id, block.name, _input(text))

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
