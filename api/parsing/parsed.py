"""The pieces of an answer: reasoning, content and tool calls, and the interface of the parsers that find them."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol


class CallDelta(NamedTuple):
    index: int  # type: ignore[assignment]  # not tuple.index
    id: str
    name: str | None  # only in a call's first delta
    arguments: str  # JSON, or a part of it


class Parsed(NamedTuple):
    """The addition of some text to an answer, in this order."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallDelta, ...] = ()


class AnswerParser(Protocol):
    """Parses the text of one answer; the result depends on the text only, not on its slices."""

    def feed(self, text: str) -> Parsed: ...

    def finish(self) -> Parsed: ...


def merged(first: Parsed, then: Parsed) -> Parsed:
    """Return both as one; pieces of one call become one piece."""
    calls = list(first.calls)
    for delta in then.calls:
        if calls and calls[-1].index == delta.index:
            calls[-1] = calls[-1]._replace(arguments=calls[-1].arguments + delta.arguments)
        else:
            calls.append(delta)
    return Parsed(first.reasoning + then.reasoning, first.content + then.content, tuple(calls))


def in_order(parser: AnswerParser, text: str) -> Iterator[Parsed]:
    """Feed the parser; return several pieces where content comes after a call, so that their order is the text's."""
    pending = Parsed()
    for char in text:
        piece = parser.feed(char)
        if pending.calls and (piece.content or piece.reasoning):
            yield pending
            pending = Parsed()
        if any(piece):
            pending = merged(pending, piece)
    if any(pending):
        yield pending
