"""The items of one response's output while its answer grows, and the events that tell of them.

One item is open at a time, the last one. Events are numbered from 0 on, without gaps.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeAlias

from msgspec import UNSET, Struct

from api.openai_responses import answers
from api.openai_responses.tools import Called, input_of
from api.parsing.parsed import Parsed
from api.responses import Event, named_event

Kind: TypeAlias = Literal["reasoning", "message", "function_call", "custom_tool_call"]

_PREFIXES: dict[Kind, str] = {"reasoning": "rs", "message": "msg", "function_call": "fc", "custom_tool_call": "ctc"}
_TEXT: dict[Kind, str] = {"reasoning": "reasoning_text", "message": "output_text"}
_CALLED: dict[Kind, tuple[str, str]] = {  # a call's event and the field of its text
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
}
_NO_TOOL = Called("")


class GrowingItem(Struct):
    kind: Kind
    id: str
    texts: list[str]
    call_id: str = ""
    called: Called = _NO_TOOL

    def shown(self, status: answers.Status, text: str | None = None) -> answers.OutputItem:
        """The item with all its text, or with none yet."""
        text = "".join(self.texts) if text is None else text
        match self.kind:
            case "message":
                content = [answers.OutputText(text=text)] if status != "in_progress" else []
                return answers.MessageItem(id=self.id, status=status, content=content)
            case "reasoning":
                thoughts = [answers.ReasoningText(text)] if status != "in_progress" else []
                return answers.ReasoningItem(id=self.id, status=status, content=thoughts)
        return self._call(status, text)

    def _call(self, status: answers.Status, text: str) -> answers.OutputItem:
        name, namespace = self.called.name, UNSET if self.called.namespace is None else self.called.namespace
        if self.called.is_custom:
            return answers.CustomToolCallItem(
                id=self.id, status=status, call_id=self.call_id, name=name, namespace=namespace, input=text
            )
        return answers.FunctionCallItem(
            id=self.id, status=status, call_id=self.call_id, name=name, namespace=namespace, arguments=text
        )

    def part(self, text: str) -> answers.OutputText | answers.ReasoningText:
        return answers.OutputText(text=text) if self.kind == "message" else answers.ReasoningText(text)


class Output:
    """Turns pieces of an answer into events, and keeps them; `add` pieces in order, then `finish` once."""

    def __init__(self, response_id: str, tools: Mapping[str, Called] | None = None) -> None:
        self._tools = tools or {}  # tools by the name that the model is shown; others are functions
        self._arguments: list[str] | None = None  # those of the open item, if that is a call of a custom tool
        self._token = response_id.partition("_")[2] or response_id
        self._items: list[GrowingItem] = []
        self._open = False
        self._call: int | None = None  # the index of the open item's call

    def add(self, parsed: Parsed) -> Iterator[Event]:
        if parsed.reasoning:
            yield from self._enter("reasoning")
            yield from self._grow(parsed.reasoning)
        if parsed.content:
            yield from self._enter("message")
            yield from self._grow(parsed.content)
        for call in parsed.calls:
            if call.name is not None:
                called = self._tools.get(call.name, Called(call.name))
                yield from self._begin("custom_tool_call" if called.is_custom else "function_call", call.id, called)
                self._call, self._arguments = call.index, [] if called.is_custom else None
            assert call.index == self._call, f"a piece of call {call.index} came after call {self._call} had begun"
            if self._arguments is None:
                yield from self._grow(call.arguments)
            else:
                self._arguments.append(call.arguments)

    def finish(self, status: answers.Status = "completed") -> Iterator[Event]:
        """Close the open item; `status` says whether it is whole."""
        if not self._open:
            return
        if self._arguments is not None:
            yield from self._grow(input_of("".join(self._arguments)))
        item, where = self._items[-1], self._where
        text = "".join(item.texts)
        if item.kind in _CALLED:
            event, field = _CALLED[item.kind]
            named = {} if item.called.is_custom else {"name": item.called.name}
            yield f"{event}.done", where | named | {field: text}
        else:
            at = where | {"content_index": 0}
            more: dict[str, Any] = {"logprobs": []} if item.kind == "message" else {}
            yield f"response.{_TEXT[item.kind]}.done", at | {"text": text} | more
            yield "response.content_part.done", at | {"part": item.part(text)}
        self._open, self._call, self._arguments = False, None, None
        yield "response.output_item.done", {"output_index": self._last, "item": item.shown(status)}

    def items(self, last: answers.Status = "completed") -> list[answers.OutputItem]:
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

    def _begin(self, kind: Kind, call_id: str = "", called: Called = _NO_TOOL) -> Iterator[Event]:
        yield from self.finish()
        id = f"{_PREFIXES[kind]}_{self._token}_{len(self._items)}"
        self._items.append(GrowingItem(kind, id, [], call_id, called))
        self._open = True
        shown = self._items[-1].shown("in_progress")
        yield "response.output_item.added", {"output_index": self._last, "item": shown}

    def _grow(self, text: str) -> Iterator[Event]:
        if not text:
            return
        item = self._items[-1]
        item.texts.append(text)
        if item.kind in _CALLED:
            yield f"{_CALLED[item.kind][0]}.delta", self._where | {"delta": text}
            return
        more: dict[str, Any] = {"logprobs": []} if item.kind == "message" else {}
        yield f"response.{_TEXT[item.kind]}.delta", self._where | {"content_index": 0, "delta": text} | more


def event_bytes(event: Event, sequence_number: int) -> bytes:
    kind, fields = event
    return named_event(kind, {"sequence_number": sequence_number, **fields})
