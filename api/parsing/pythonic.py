"""Calls written as a list of Python calls, whose arguments become JSON: `[get_weather(city="Paris")]`."""

import json
import math
import re

from api.parsing.calls import MAX_NAME, CallParser, Steps, Unexpected, in_quotes

MAX_DEPTH = 32  # of lists and dictionaries in arguments: each takes a few frames of Python's stack
MAX_NUMBER = 400  # characters
CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
ESCAPES = dict(zip("abfnrtv\\'\"", "\a\b\f\n\r\t\v\\'\"", strict=True)) | {"\n": ""}
HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
NUMBER = re.compile(r"[+-]?(\d[\d_]*)?(\.\d*)?([eE][+-]?\d+)?")


class PythonicParser(CallParser):
    """Llama 3.2 and 4; the list may stand between `<|python_start|>` and `<|python_end|>`.

    Nothing else marks such a call, so it is one only at the beginning of an answer and with a function of the request.
    """

    opening = "[<"
    markers = ("<|python_start|>", "<|python_end|>")

    def _may_begin(self) -> bool:
        return not self._has_content

    def _calls(self, first: str, char: str) -> Steps[str]:
        if self.count:
            char = yield from self._literal(char, "|python_end|>")
            self._drop()
            return char
        if first == "<":
            char = yield from self._literal(char, "|python_start|>")
            char = yield from self._spaces(char)
            char = yield from self._literal(char, "[")
        return (yield from self._listed(char, self._call))

    def _call(self, char: str) -> Steps[str]:
        name, char = yield from self._identifier(char)
        if name not in self._functions:
            raise Unexpected(char)
        char = yield from self._literal(char, "(")
        char = yield from self._spaces(char)
        separator, opened = "{", False
        while char != ")":
            keyword, char = yield from self._keyword(char)
            if opened:
                self._drop()
            else:
                opened = True
                self._open(name)
            self._add(f"{separator}{json.dumps(keyword)}: ")
            separator = ", "
            char = yield from self._skipped((yield from self._value(char, 0)))
            if char == ",":
                char = yield from self._skipped((yield))
            elif char != ")":
                raise Unexpected(char)
        if not opened:
            self._open(name)
        self._add("}" if opened else "{}")
        return (yield)

    def _keyword(self, char: str) -> Steps[tuple[str, str]]:
        """Take `name=` and look at the value's beginning."""
        keyword, char = yield from self._identifier(char)
        char = yield from self._spaces(char)
        char = yield from self._literal(char, "=")
        char = yield from self._spaces(char)
        if not (char and (char in "'\"[({+-." or char.isdigit() or char in "TFNtfn")):
            raise Unexpected(char)
        return keyword, char

    def _identifier(self, char: str) -> Steps[tuple[str, str]]:
        name: list[str] = []
        while char and (char.isalnum() or char in "_.-") and len(name) <= MAX_NAME:
            name.append(char)
            char = yield from self._take(char)
        if not 0 < len(name) <= MAX_NAME:
            raise Unexpected(char)
        return "".join(name), char

    # ---- values

    def _value(self, char: str, depth: int) -> Steps[str]:
        if depth > MAX_DEPTH:
            raise Unexpected(char)
        if char and char in "'\"":
            return (yield from self._string(char))
        if char == "{":
            self._add("{")
            char = yield from self._skipped((yield))
            first = True
            while char != "}":
                if char == "" or char not in "'\"":
                    raise Unexpected(char)  # only strings are keys in JSON
                if not first:
                    self._add(", ")
                first = False
                char = yield from self._skipped((yield from self._string(char)))
                if char != ":":
                    raise Unexpected(char)
                self._add(": ")
                char = yield from self._skipped((yield))
                char = yield from self._skipped((yield from self._value(char, depth + 1)))
                char = yield from self._after_item(char, "}")
            self._add("}")
            return (yield)
        if char and char in "[(":
            closing = "]" if char == "[" else ")"
            self._add("[")
            char = yield from self._skipped((yield))
            first = True
            while char != closing:
                if not first:
                    self._add(", ")
                first = False
                char = yield from self._skipped((yield from self._value(char, depth + 1)))
                char = yield from self._after_item(char, closing)
            self._add("]")
            return (yield)
        # Take a number or a constant.
        word = ""
        while char and (char.isalnum() or char in "+-._") and len(word) <= MAX_NUMBER:
            word += char
            char = yield
        shown = CONSTANTS.get(word) or _number(word)
        if shown is None:
            self._add(word)
            raise Unexpected(char)
        self._add(shown)
        return char

    def _after_item(self, char: str, closing: str) -> Steps[str]:
        if char == ",":
            return (yield from self._skipped((yield)))
        if char != closing:
            raise Unexpected(char)
        return char

    def _string(self, quote: str) -> Steps[str]:
        self._add('"')
        char = yield from self._in_quotes()
        while char != quote:
            if char == "":
                raise Unexpected(char)
            if char == "\\":
                char = yield from self._escape((yield))
            else:
                self._add(in_quotes(char))
                char = yield from self._in_quotes()
        self._add('"')
        return (yield)

    def _in_quotes(self) -> Steps[str]:
        self._in_string = True
        char = yield
        self._in_string = False
        return char

    def _escape(self, char: str) -> Steps[str]:
        """Take an escape after its backslash; what is none stands for itself, as in Python."""
        if char in HEX_DIGITS:
            number = 0
            for _ in range(HEX_DIGITS[char]):
                char = yield
                if char == "" or char not in "0123456789abcdefABCDEF":
                    raise Unexpected(char)
                number = number * 16 + int(char, 16)
            if number > 0x10FFFF:
                raise Unexpected((yield))
            self._add(in_quotes(chr(number)))
            return (yield)
        if char and char in "01234567":
            number, digits = 0, 0
            while char and char in "01234567" and digits < 3:
                number, digits = number * 8 + int(char), digits + 1
                char = yield
            self._add(in_quotes(chr(number)))
            return char
        if char == "":
            raise Unexpected(char)
        self._add(in_quotes(ESCAPES.get(char, "\\" + char)))
        return (yield)


def _number(word: str) -> str | None:
    """A Python number as JSON; None if it is none that JSON has."""
    if len(word) > MAX_NUMBER or not NUMBER.fullmatch(word):
        return None
    try:
        number = int(word) if word.lstrip("+-").replace("_", "").isdigit() else float(word)
    except ValueError:
        return None
    return json.dumps(number) if math.isfinite(number) else None
