"""Calls whose arguments stand between tags, as text: the formats of Qwen3-Coder and GLM. Schemas give their types.

Text arguments are passed on as they come; others when they are complete, since their end may change what they are.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from api.parsing.calls import MAX_NAME, CallParser, Steps, Unexpected, in_quotes

MAX_VALUE = 2**20  # characters of an argument that is not text
MAX_DEPTH = 16  # of choices in a schema
CHOICES = ("anyOf", "oneOf", "allOf")
TYPES: dict[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}
TRUTHS = {"true": True, "1": True, "false": False, "0": False}


class TaggedCallParser(CallParser):
    """Reads a name, and arguments between tags."""

    opening = "<"
    string_stop = re.compile(r'["<\\\x00-\x1f]')
    argument: ClassVar[str]  # the tag that begins an argument
    closing: ClassVar[str]  # the tag that ends a call
    ends: ClassVar[tuple[str, ...]]  # tags that end a value: its own, and those before which it was forgotten
    trims: ClassVar[bool] = False  # a line break after the first tag, and one before the last, belong to them

    def _calls(self, first: str, char: str) -> Steps[str]:  # noqa: ARG002
        if char == "/" and self._after_call:
            char = yield from self._literal(char, "/tool_call>")
            self._drop()
            return char
        name, tag = yield from self._head(char)
        self._open(name)
        before = "{"
        while tag == self.argument:
            key = yield from self._key()
            self._drop()
            self._add(f"{before}{_json(key)}: ")
            before = ", "
            tag = yield from self._value(types_of(self._properties(name).get(key)))
            if tag == self.ends[0]:
                tag = yield from self._next()
        self._add("{}" if before == "{" else "}")
        self._drop()
        return (yield) if tag else ""

    def _head(self, char: str) -> Steps[tuple[str, str]]:
        """Take what stands before the arguments; return the name, and the tag after it."""
        raise NotImplementedError

    def _key(self) -> Steps[str]:
        """Take the name of an argument after its tag, up to its value."""
        raise NotImplementedError

    def _next(self) -> Steps[str]:
        """Take the tag after an argument; empty at the end of the text. Before anything else the call is complete."""
        char = yield from self._skipped((yield))
        if char == "":
            return ""
        try:
            return (yield from self._tag(char, (self.argument, self.closing)))
        except Unexpected:
            self._add("}")
            raise

    def _properties(self, name: str) -> dict[str, Any]:
        properties = self._functions.get(name, {}).get("properties")
        return properties if isinstance(properties, dict) else {}

    # ---- tags

    def _tag(self, char: str, tags: tuple[str, ...]) -> Steps[str]:
        """Take one of these tags."""
        tag = ""
        while True:
            if not char or not any(each.startswith(tag + char) for each in tags):
                raise Unexpected(char)
            self._hold(char)
            tag += char
            if tag in tags:
                return tag
            char = yield

    def _until(self, char: str, end: str) -> Steps[str]:
        """Take a name before this character, which is not taken."""
        name: list[str] = []
        while char != end:
            if not char or len(name) == MAX_NAME:
                raise Unexpected(char)
            name.append(char)
            char = yield from self._take(char)
        return "".join(name)

    # ---- values

    def _value(self, types: frozenset[str]) -> Steps[str]:
        """Take a value, and pass it on as JSON; return the tag that ends it."""
        if types == {"string"}:
            self._add('"')
            tag = yield from self._text(lambda text: self._add(in_quotes(text)), passed_on=True)
            self._add('"')
            return tag
        pieces: list[str] = []
        tag = yield from self._text(pieces.append, passed_on=False)
        self._add(typed("".join(pieces), types))
        return tag

    def _text(self, emit: Callable[[str], None], *, passed_on: bool) -> Steps[str]:
        line_break, taken = "", 0
        char = yield
        if self.trims and char == "\n":
            char = yield
        while True:
            if char == "" or ((taken := taken + 1) > MAX_VALUE and not passed_on):
                raise Unexpected(char)
            if char == "<":
                tag, following = yield from self._perhaps_tag(char)
                if following is None:
                    return tag
                emit(line_break + tag)
                line_break, char = "", following
                continue
            if char == "\n" and self.trims:
                if line_break:
                    emit(line_break)
                line_break = char
            else:
                emit(line_break + char)
                line_break = ""
            self._in_string = passed_on and not line_break
            char = yield
            self._in_string = False

    def _perhaps_tag(self, char: str) -> Steps[tuple[str, str | None]]:
        """Take a tag that ends a value, or what begins like one; return it, and the next character if it is none."""
        tag = char
        while True:
            char = yield
            if not char or not any(each.startswith(tag + char) for each in self.ends):
                return tag, char
            tag += char
            if tag in self.ends:
                return tag, None


class Qwen3CoderParser(TaggedCallParser):
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`; the outer tags may lack."""

    markers = ("<tool_call>", "</tool_call>")
    argument, closing = "<parameter=", "</function>"
    ends = ("</parameter>", "<parameter=", "</function>")
    trims = True

    def _head(self, char: str) -> Steps[tuple[str, str]]:
        if char != "f":
            char = yield from self._literal(char, "tool_call>")
            char = yield from self._spaces(char)
            char = yield from self._literal(char, "<")
        char = yield from self._literal(char, "function=")
        name = yield from self._until(char, ">")
        if not name.isprintable() or not name or "<" in name:
            raise Unexpected(">")
        char = yield from self._take(">")
        char = yield from self._spaces(char)
        return name, (yield from self._tag(char, (self.argument, self.closing)))

    def _key(self) -> Steps[str]:
        key = yield from self._until((yield), ">")
        self._hold(">")
        return key


class Glm45Parser(TaggedCallParser):
    """`<tool_call>name`, then `<arg_key>key</arg_key><arg_value>value</arg_value>` for each argument, `</tool_call>`.

    A name has no marker of its own, so it has to be a function of the request.
    """

    markers = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    argument, closing = "<arg_key>", "</tool_call>"
    ends = ("</arg_value>", "</tool_call>")

    def _head(self, char: str) -> Steps[tuple[str, str]]:
        char = yield from self._literal(char, "tool_call>")
        name = (yield from self._until(char, "<")).strip()
        if name not in self._functions:
            raise Unexpected("<")
        return name, (yield from self._tag("<", (self.argument, self.closing)))

    def _key(self) -> Steps[str]:
        key = yield from self._until((yield), "<")
        yield from self._tag("<", ("</arg_key>",))
        char = yield from self._spaces((yield))
        yield from self._tag(char, ("<arg_value>",))
        return key.strip()


# ---- types


def types_of(schema: object) -> frozenset[str]:
    """The JSON types that a schema allows; a string where it does not say."""
    return frozenset(_types(schema, 0)) or frozenset({"string"})


def _types(schema: object, depth: int) -> Iterator[str]:
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return
    named, values = schema.get("type"), schema.get("enum")
    yield from (one for one in (named if isinstance(named, list) else [named]) if isinstance(one, str))
    yield from (TYPES[type(one)] for one in (values if isinstance(values, list) else ()))
    for key in CHOICES:
        choices = schema.get(key)
        for choice in choices if isinstance(choices, list) else ():
            yield from _types(choice, depth + 1)


def typed(text: str, types: frozenset[str]) -> str:
    """The text as JSON of the first of these types that it can be, in vLLM's order; else as a string."""
    if "null" in types and text.lower() == "null":
        return "null"
    if types & {"integer", "number"} and (number := _number(text, whole="number" not in types)) is not None:
        return number
    if "boolean" in types and (truth := TRUTHS.get(text.lower().strip())) is not None:
        return _json(truth)
    if types & {"object", "array"} or "string" not in types:
        try:
            return _json(json.loads(text))
        except (ValueError, RecursionError):
            pass
    return _json(text)


def _number(text: str, *, whole: bool) -> str | None:
    try:
        return str(int(text))
    except ValueError:
        pass
    try:
        return None if whole else _json(float(text))
    except ValueError:
        return None


def _json(value: object) -> str:
    """JSON that can be sent; ValueError for numbers that it does not have."""
    shown = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return shown if shown.isascii() or _is_sendable(shown) else json.dumps(value)


def _is_sendable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False  # half of a surrogate pair
    return True
