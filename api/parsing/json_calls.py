"""Calls written as JSON objects with a name and arguments: the formats of Hermes, Llama 3, Mistral, and of vLLM's
`tool_choice: "required"`.
"""

import json
from collections.abc import Callable
from typing import Any

from api.parsing.calls import MAX_NAME, CallParser, Steps, Unexpected

ARGUMENTS = ("arguments", "parameters")
MAX_DEPTH = 256  # the nesting of objects and lists in arguments
CLOSING = {"{": "}", "[": "]"}
# Outside of strings; anything else ends a value that is not JSON.
PLAIN = frozenset(" \t\r\n:,+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")


class JsonCallParser(CallParser):
    """Reads one object with a name and arguments, in any order."""

    def _object(self, char: str) -> Steps[str]:
        return (yield from self._members((yield from self._literal(char, "{"))))

    def _members(self, char: str, *, known_only: bool = False) -> Steps[str]:
        """Take a call after its brace; with `known_only` it names a function of the request and has no other keys."""
        name: str | None = None
        arguments: str | None = None  # known before the name
        opened = False
        while True:
            char = yield from self._spaces(char)
            key, char = yield from self._string(char)
            char = yield from self._spaces(char)
            char = yield from self._literal(char, ":")
            char = yield from self._spaces(char)
            if key == "name" and name is None:
                name, char = yield from self._string(char)
                is_name = 0 < len(name) <= MAX_NAME and name.isprintable()
                if not is_name or (known_only and name not in self._functions):
                    raise Unexpected(char)
                if arguments is not None:
                    opened = self._open_whole(name, arguments)
            elif key in ARGUMENTS and not opened:
                if name is None:
                    arguments, char = yield from self._whole_object(char)
                else:
                    char = yield from self._arguments(char, name)
                    opened = True
            elif known_only and not opened and key != "type":
                raise Unexpected(char)
            else:
                char = yield from self._value(char)
            char = yield from self._spaces(char)
            if char == "}":
                break
            char = yield from self._literal(char, ",")
        if not opened:
            raise Unexpected(char)
        self._drop()
        return (yield)

    # ---- the parts of an object

    def _arguments(self, char: str, name: str) -> Steps[str]:
        """Take the arguments of a call with this name, and open it as soon as they begin as an object does."""
        if char != "{":
            arguments, char = yield from self._whole_object(char)
            self._open_whole(name, arguments)
            return char
        beginning, char = yield from self._captured(self._spaces((yield from self._take(char))))
        if char not in ('"', "}"):
            raise Unexpected(char)
        self._open(name)
        self._add("{" + beginning)
        return (yield from self._rest(char, passed_on=True))

    def _open_whole(self, name: str, arguments: str) -> bool:
        self._open(name)
        self._add(arguments)
        return True

    def _whole_object(self, char: str) -> Steps[tuple[str, str]]:
        """Take arguments as a whole: an object, null, or a string with the JSON of an object."""
        text, char = yield from self._captured(self._value(char))
        value = _loaded(text, char)
        if isinstance(value, str):
            text, value = value, _loaded(value, char)
        if value is None:
            return "{}", char
        if not isinstance(value, dict):
            raise Unexpected(char)
        return (text if text.isprintable() else json.dumps(value)), char

    def _string(self, char: str) -> Steps[tuple[str, str]]:
        if char != '"':
            raise Unexpected(char)
        text, char = yield from self._captured(self._value(char))
        value = _loaded(text, char)
        assert isinstance(value, str)
        return value, char

    def _captured(self, steps: Steps[str]) -> Steps[tuple[str, str]]:
        """Take these steps, which hold what they take; return that, and the next character."""
        before = len(self._held)
        char = yield from steps
        return "".join(self._held[before:]), char

    # ---- values

    def _value(self, char: str) -> Steps[str]:
        """Take a JSON value, and hold it."""
        if char in CLOSING or char == '"':
            return (yield from self._rest(char))
        if not char.isalnum() and char != "-":
            raise Unexpected(char)
        while char and (char.isalnum() or char in "+-."):
            char = yield from self._take(char)
        return char

    def _rest(self, char: str, *, passed_on: bool = False) -> Steps[str]:
        """Take a value and hold it; or the arguments after their brace, and pass them on."""
        emit = self._add if passed_on else self._hold
        open_brackets = ["}"] if passed_on else []
        while True:
            if char == '"':
                yield from self._string_to_its_end(emit, passed_on)
            elif char in CLOSING and len(open_brackets) < MAX_DEPTH:
                open_brackets.append(CLOSING[char])
                emit(char)
            elif open_brackets and char == open_brackets[-1]:
                open_brackets.pop()
                emit(char)
            elif char in PLAIN:
                emit(char)
            else:
                raise Unexpected(char)
            char = yield
            if not open_brackets:
                return char

    def _string_to_its_end(self, emit: Callable[[str], None], passed_on: bool) -> Steps[None]:
        emit('"')
        while True:
            self._in_string = passed_on
            char = yield
            self._in_string = False
            if char == "":
                raise Unexpected(char)
            # A line break may not stand in a string of JSON; models write some, and mean them.
            emit(json.dumps(char)[1:-1] if passed_on and char < " " else char)
            if char == "\\":
                escaped = yield
                if escaped == "":
                    raise Unexpected(escaped)
                emit(escaped)
            elif char == '"':
                return


def _loaded(text: str, char: str) -> Any:
    try:
        text.encode()  # half of a surrogate pair, escaped twice, could not be sent
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        raise Unexpected(char) from None


class HermesParser(JsonCallParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes 2 Pro, Qwen 2.5 and Qwen 3."""

    opening = "<"
    markers = ("<tool_call>", "</tool_call>")

    def _calls(self, first: str, char: str) -> Steps[str]:  # noqa: ARG002
        if char == "/" and self._after_call:
            char = yield from self._literal(char, "/tool_call>")
            self._drop()
            return char
        char = yield from self._literal(char, "tool_call>")
        char = yield from self._object((yield from self._spaces(char)))
        while char and (char.isspace() or char in "}],"):  # more than there is to close
            char = yield
        return char


class Llama3JsonParser(JsonCallParser):
    """`{"name": ..., "parameters": {...}}` with semicolons between, perhaps after `<|python_tag|>`.

    Nothing else marks such a call, so it has to name a function of the request.
    """

    opening = "{<"
    separators = ";,"
    markers = ("<|python_tag|>",)

    def _calls(self, first: str, char: str) -> Steps[str]:
        if first == "<":
            char = yield from self._literal(char, "|python_tag|>")
            char = yield from self._spaces(char)
            char = yield from self._literal(char, "{")
        return (yield from self._members(char, known_only=True))


class MistralParser(JsonCallParser):
    """`[TOOL_CALLS]` with a list of objects, or (since version 11) with a name and arguments, once for each call."""

    opening = "["
    markers = ("[TOOL_CALLS]", "[/TOOL_CALLS]", "[CALL_ID]", "[ARGS]")

    def _calls(self, first: str, char: str) -> Steps[str]:  # noqa: ARG002
        if char == "/" and self._after_call:
            char = yield from self._literal(char, "/TOOL_CALLS]")
            self._drop()
            return char
        char = yield from self._literal(char, "TOOL_CALLS]")
        char = yield from self._spaces(char)
        if char == "[":
            return (yield from self._listed((yield from self._take(char)), self._object))
        if char == "{":
            return (yield from self._object(char))
        # Take `name{...}` or `name[ARGS]{...}`; an id of the model's own may stand between.
        name, char = yield from self._word(char)
        if not 0 < len(name) <= MAX_NAME:
            raise Unexpected(char)
        if char == "[":
            char = yield from self._take(char)
            if char == "C":
                char = yield from self._literal(char, "CALL_ID]")
                _, char = yield from self._word(char)
                char = yield from self._literal(char, "[")
            char = yield from self._literal(char, "ARGS]")
        char = yield from self._spaces(char)
        if char != "{":
            raise Unexpected(char)
        return (yield from self._arguments(char, name))

    def _word(self, char: str) -> Steps[tuple[str, str]]:
        word: list[str] = []
        while char and (char.isalnum() or char in "_-."):
            word.append(char)
            char = yield from self._take(char)
        return "".join(word), (yield from self._spaces(char))


class RequiredCallsParser(JsonCallParser):
    """A JSON list of calls, in which `tool_choice: "required"` is answered."""

    opening = "["

    def _may_begin(self) -> bool:
        return not self.count and not self._has_content

    def _calls(self, first: str, char: str) -> Steps[str]:  # noqa: ARG002
        return (yield from self._listed(char, self._object))
