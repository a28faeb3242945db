"""The pieces of an answer: reasoning, content and tool calls, and the interface of the parsers that find them."""

from typing import NamedTuple, Protocol


class CallDelta(NamedTuple):
    """A piece of one tool call."""

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
