"""The common part of all formats of tool calls: a state machine that takes one character at a time.

Text that may begin a call is held back. Once the call's name and the beginning of its arguments are known, the call is
opened, and its arguments are passed on as they come. Text that turns out to be no call is content, unchanged.
A parser of a format is a generator that is sent the next character, or an empty string at the end.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from typing import Any, ClassVar, TypeAlias, TypeVar

from api.parsing.parsed import CallDelta

T = TypeVar("T")
# Is sent characters, and returns something; most return the first character that they did not take.
Steps: TypeAlias = Generator[None, str, T]

MAX_HELD = 2**16  # characters of a call that cannot be opened yet
MAX_NAME = 256
STRING_STOP = re.compile(r"[\"'\\\x00-\x1f]")  # Only these may mean something within a string.


class Unexpected(Exception):
    """The text breaks the rules of its format at this character; None: at one that is held already."""

    def __init__(self, char: str | None = None) -> None:
        self.char = char


class _OpenDelta:
    def __init__(self, index: int, name: str | None) -> None:
        self.index = index
        self.name = name
        self.arguments: list[str] = []


class CallParser(ABC):
    """Separates calls from content; `functions` are the request's, by name, with the schemas of their arguments."""

    opening: ClassVar[str]  # characters that calls may begin with
    separators: ClassVar[str] = ""  # characters that may stand between two calls
    markers: ClassVar[tuple[str, ...]] = ()  # the format's own, which may be special tokens

    def __init__(
        self,
        new_id: Callable[[int], str],
        functions: Mapping[str, Mapping[str, Any]] | None = None,
        most: int | None = None,
    ) -> None:
        self.count = 0  # the number of calls so far
        self._new_id = new_id
        self._functions = functions or {}
        self._most = most  # further calls are dropped
        self._held: list[str] = []
        self._content: list[str] = []
        self._deltas: list[_OpenDelta] = []
        self._in_text = True
        self._in_string = False  # its plain characters are passed on
        self._after_call = False  # directly, or with spaces between
        self._has_content = False
        self._opening = re.compile(f"[{re.escape(self.opening)}]")
        self._machine = self._parse()
        next(self._machine)

    def feed(self, text: str) -> tuple[str, tuple[CallDelta, ...]]:
        """Take text; return the content and the parts of calls that it completes."""
        at = 0
        while at < len(text):
            plain = ""  # the characters from here on that have no meaning for the machine
            if self._in_string:
                found = STRING_STOP.search(text, at)
                if plain := text[at : found.start() if found else len(text)]:
                    self._add(plain)
            elif self._in_text and not self._held and not self._after_call:
                found = self._opening.search(text, at)
                plain = text[at : found.start() if found else len(text)].rstrip()
                self._say(plain)
            if plain:
                at += len(plain)
            else:
                self._machine.send(text[at])
                at += 1
        return self._taken()

    def finish(self) -> tuple[str, tuple[CallDelta, ...]]:
        """Return what was held back, at the end of the text."""
        self._machine.send("")
        return self._taken()

    @abstractmethod
    def _calls(self, first: str, char: str) -> Steps[str]:
        """Take a call or several that begin with `first`, which is held; `char` is the next character."""

    def _may_begin(self) -> bool:
        """Tell whether a call may begin here."""
        return True

    # ---- the machine

    def _parse(self) -> Steps[None]:
        char = yield
        while True:
            if char.isspace() or (char and self._after_call and char in self.separators):
                # Spaces before a call, and what stands between two, belong to the format: not so before other content.
                if len(self._held) == MAX_HELD:
                    self._release()
                self._held.append(char)
            elif char and char in self.opening and self._may_begin():
                self._in_text = False
                try:
                    self._hold(char)
                    following: str | None = yield from self._calls(char, (yield))
                except Unexpected as unexpected:
                    following = unexpected.char
                    self._release()
                self._in_text, self._in_string = True, False
                char = (yield) if following is None else following
                continue
            elif char or not self._after_call:
                self._release()
                self._say(char)
            char = yield

    # ---- for the formats

    def _hold(self, char: str) -> None:
        self._held.append(char)
        if len(self._held) > MAX_HELD:
            raise Unexpected

    def _take(self, char: str) -> Steps[str]:
        """Hold this character; return the next one."""
        self._hold(char)
        return (yield)

    def _literal(self, char: str, expected: str) -> Steps[str]:
        for each in expected:
            if char != each:
                raise Unexpected(char)
            char = yield from self._take(char)
        return char

    def _spaces(self, char: str) -> Steps[str]:
        while char.isspace():
            char = yield from self._take(char)
        return char

    def _listed(self, char: str, call: Callable[[str], Steps[str]]) -> Steps[str]:
        """Take calls after their bracket, with commas between, and the bracket after them."""
        while True:
            char = yield from call((yield from self._spaces(char)))
            char = yield from self._spaces(char)
            if char != ",":
                break
            char = yield from self._take(char)
        if char != "]":
            raise Unexpected(char)
        self._drop()
        return (yield)

    def _open(self, name: str) -> None:
        """Begin a call: what was held is a part of it."""
        self._deltas.append(_OpenDelta(self.count, name))
        self.count += 1
        self._drop()

    def _add(self, arguments: str) -> None:
        """Pass on a part of the arguments of the call that was opened last."""
        if not self._deltas:
            self._deltas.append(_OpenDelta(self.count - 1, None))
        self._deltas[-1].arguments.append(arguments)

    def _drop(self) -> None:
        """Forget what is held, as a part of calls."""
        self._held.clear()
        self._after_call = True

    # ---- events for the caller

    def _release(self) -> None:
        held = "".join(self._held)
        self._held.clear()
        self._say(held)

    def _say(self, text: str) -> None:
        if text:
            self._content.append(text)
            self._after_call = False
            self._has_content = True

    def _taken(self) -> tuple[str, tuple[CallDelta, ...]]:
        content = "".join(self._content)
        self._content.clear()
        if not self._deltas:
            return content, ()
        calls = tuple(
            CallDelta(delta.index, self._new_id(delta.index), delta.name, "".join(delta.arguments))
            for delta in self._deltas
            if self._most is None or delta.index < self._most
        )
        self._deltas.clear()
        return content, calls
