"""The items of one response's output while its answer grows, and the events that tell of them.

One item is open at a time, the last one. Events are numbered from 0 on, without gaps.
"""

from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from api.openai_responses.answers import (
    FunctionCallItem,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Status,
)
from api.parsing.parsed import CallDelta, Parsed
from api.responses import encode

Kind: TypeAlias = Literal["reasoning", "message", "function_call"]
Event: TypeAlias = tuple[str, dict[str, Any]]  # its type, and its other fields

_PREFIXES: dict[Kind, str] = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
_TEXT: dict[Kind, str] = {"reasoning": "reasoning_text", "message": "output_text"}


class GrowingItem(Struct):
    kind: Kind
    id: str
    texts: list[str]
    call_id: str = ""
    name: str = ""

    def shown(self, status: Status, text: str | None = None) -> OutputItem:
        """The item with all its text, or with none yet."""
        text = "".join(self.texts) if text is None else text
        match self.kind:
            case "message":
                content = [OutputText(text=text)] if status != "in_progress" else []
                return MessageItem(id=self.id, status=status, content=content)
            case "reasoning":
                thoughts = [ReasoningText(text)] if status != "in_progress" else []
                return ReasoningItem(id=self.id, status=status, content=thoughts)
        return FunctionCallItem(id=self.id, status=status, call_id=self.call_id, name=self.name, arguments=text)

    def part(self, text: str) -> OutputText | ReasoningText:
        return OutputText(text=text) if self.kind == "message" else ReasoningText(text)


class Output:
    """Turns pieces of an answer into events, and keeps them; `add` pieces in order, then `finish` once."""

    def __init__(self, response_id: str) -> None:
        self._token = response_id.partition("_")[2] or response_id
        self._items: list[GrowingItem] = []
        self._open = False
        self._call: int | None = None  # the index of the open item's call

    def add(self, parsed: Parsed) -> Iterator[Event]:
        if parsed.reasoning:
            yield from self._enter("reasoning")
            yield self._grow(parsed.reasoning)
        if parsed.content:
            yield from self._enter("message")
            yield self._grow(parsed.content)
        for call in parsed.calls:
            yield from self._add_call(call)

    def finish(self, status: Status = "completed") -> Iterator[Event]:
        """Close the open item; `status` says whether it is whole."""
        if not self._open:
            return
        item, where = self._items[-1], self._where
        text = "".join(item.texts)
        if item.kind == "function_call":
            yield "response.function_call_arguments.done", where | {"name": item.name, "arguments": text}
        else:
            at = where | {"content_index": 0}
            more: dict[str, Any] = {"logprobs": []} if item.kind == "message" else {}
            yield f"response.{_TEXT[item.kind]}.done", at | {"text": text} | more
            yield "response.content_part.done", at | {"part": item.part(text)}
        self._open, self._call = False, None
        yield "response.output_item.done", {"output_index": self._last, "item": item.shown(status)}

    def items(self, last: Status = "completed") -> list[OutputItem]:
        """All items, whole; `last` is the status of the last one."""
        return [item.shown(last if place == self._last else "completed") for place, item in enumerate(self._items)]

    @property
    def _last(self) -> int:
        return len(self._items) - 1

    @property
    def _where(self) -> dict[str, Any]:
        return {"item_id": self._items[-1].id, "output_index": self._last}

    def _enter(self, kind: Kind) -> Iterator[Event]:
        if self._open and self._items[-1].kind == kind:
            return
        yield from self._begin(kind)
        item = self._items[-1]
        yield "response.content_part.added", self._where | {"content_index": 0, "part": item.part("")}

    def _begin(self, kind: Kind, call_id: str = "", name: str = "") -> Iterator[Event]:
        yield from self.finish()
        id = f"{_PREFIXES[kind]}_{self._token}_{len(self._items)}"
        self._items.append(GrowingItem(kind, id, [], call_id, name))
        self._open = True
        shown = self._items[-1].shown("in_progress")
        yield "response.output_item.added", {"output_index": self._last, "item": shown}

    def _add_call(self, call: CallDelta) -> Iterator[Event]:
        if call.name is not None:
            yield from self._begin("function_call", call.id, call.name)
            self._call = call.index
        assert call.index == self._call, f"a piece of call {call.index} came after call {self._call} had begun"
        if call.arguments:
            yield self._grow(call.arguments)

    def _grow(self, text: str) -> Event:
        item = self._items[-1]
        item.texts.append(text)
        if item.kind == "function_call":
            return "response.function_call_arguments.delta", self._where | {"delta": text}
        more: dict[str, Any] = {"logprobs": []} if item.kind == "message" else {}
        return f"response.{_TEXT[item.kind]}.delta", self._where | {"content_index": 0, "delta": text} | more


def event_bytes(event: Event, sequence_number: int) -> bytes:
    kind, fields = event
    return b"event: %b\ndata: %b\n\n" % (
        kind.encode(),
        _encode({"type": kind, "sequence_number": sequence_number} | fields),
    )


def _encode(fields: dict[str, Any]) -> bytes:
    return encode(fields)  # type: ignore[arg-type]
