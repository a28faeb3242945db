"""The content blocks of one message while its answer grows. One block is open at a time, the last one."""

import hashlib
import json
from collections.abc import Iterator

from msgspec import Raw

from api.messages import answers
from api.parsing.parsed import Parsed
from api.responses import Event

# The type of a delta, and the field of its text.
_DELTAS: dict[type[answers.Content], tuple[str, str]] = {
    answers.TextContent: ("text_delta", "text"),
    answers.ThinkingContent: ("thinking_delta", "thinking"),
    answers.ToolUseContent: ("input_json_delta", "partial_json"),
}
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

    def add(self, parsed: Parsed) -> Iterator[Event]:
        if parsed.reasoning:
            yield from self._enter(answers.ThinkingContent, answers.ThinkingContent("", ""))
            yield self._grow(parsed.reasoning)
        if parsed.content:
            yield from self._enter(answers.TextContent, answers.TextContent(""))
            yield self._grow(parsed.content)
        for call in parsed.calls:
            if call.name is not None:
                yield from self._begin(answers.ToolUseContent(call.id.replace("call_", "toolu_"), call.name, EMPTY))
                self._call = call.index
            assert call.index == self._call, f"a piece of call {call.index} came after call {self._call} had begun"
            if call.arguments:
                yield self._grow(call.arguments)

    def finish(self) -> Iterator[Event]:
        if not self._open:
            return
        block, _ = self._blocks[-1]
        if isinstance(block, answers.ThinkingContent):
            yield self._delta("signature_delta", "signature", self._signature(self._last))
        self._open, self._call = False, None
        yield "content_block_stop", {"index": self._last}

    def content(self) -> list[answers.Content]:
        made: list[answers.Content] = []
        for index, (block, texts) in enumerate(self._blocks):
            text = "".join(texts)
            match block:
                case answers.TextContent():
                    made.append(answers.TextContent(text))
                case answers.ThinkingContent():
                    made.append(answers.ThinkingContent(text, self._signature(index)))
                case answers.ToolUseContent():
                    try:
                        is_object = isinstance(json.loads(text), dict)
                    except (ValueError, RecursionError):  # the arguments break off, as at the end of max_tokens
                        is_object = False
                    given = Raw(text.encode()) if is_object else EMPTY
                    made.append(answers.ToolUseContent(block.id, block.name, given))
        return made

    @property
    def _last(self) -> int:
        return len(self._blocks) - 1

    def _enter(self, kind: type[answers.Content], block: answers.Content) -> Iterator[Event]:
        """Open a block unless one of its kind is open."""
        if self._open and isinstance(self._blocks[-1][0], kind):
            return
        yield from self._begin(block)

    def _begin(self, block: answers.Content) -> Iterator[Event]:
        yield from self.finish()
        self._blocks.append((block, []))
        self._open = True
        yield "content_block_start", {"index": self._last, "content_block": block}

    def _grow(self, text: str) -> Event:
        block, texts = self._blocks[-1]
        texts.append(text)
        return self._delta(*_DELTAS[type(block)], text)

    def _delta(self, kind: str, field: str, text: str) -> Event:
        return "content_block_delta", {"index": self._last, "delta": {"type": kind, field: text}}

    def _signature(self, index: int) -> str:
        """The signature that clients keep with thoughts. Nothing is checked with it; it is the same at any replica."""
        return hashlib.sha256(f"{self._message_id} {index}".encode()).hexdigest()
