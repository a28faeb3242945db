"""The budget of a chat template: characters that it may make, and time.

It bounds what a client's messages can make of a model's template. Every round of a loop, every call of a macro, and
every text that is made costs some, and the clock is looked at as the budget is spent. Numbers that make one step long
(repetitions, powers, widths) are looked at before. Beyond that a template is trusted as the weights beside it are.
"""

import re
import time
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

import jinja2

MAX_CHARACTERS = 128 * 1024 * 1024  # made by one rendering, in all
MAX_SECONDS = 2.0
STEP_CHARACTERS = 64  # the cost of a round or a call
LOOK_EVERY = 4096  # characters: then the clock is looked at
LARGEST_INTEGER_BITS = 4096
LARGEST_WIDTH = 4096  # the limit for padding, indenting and wrapping
LARGEST_INDENT = 16  # the limit for JSON
DEEPEST_INDENTED = 32  # values in values: each line begins with as many indents
WIDE = re.compile(r"\d{5,}|\*")  # a width in a format


class TooMuch(jinja2.TemplateError):
    """The template exceeded its budget."""


class Budget:
    """The budget left to one rendering."""

    __slots__ = ("left", "look_at", "until_s")

    def __init__(self) -> None:
        self.left = MAX_CHARACTERS
        self.look_at = MAX_CHARACTERS - LOOK_EVERY
        self.until_s = time.monotonic() + MAX_SECONDS

    def look(self) -> None:
        if self.left < 0:
            raise TooMuch(f"it makes more than {MAX_CHARACTERS} characters of them")
        if time.monotonic() > self.until_s:
            raise TooMuch(f"it takes longer than {MAX_SECONDS:g} s")
        self.look_at = self.left - LOOK_EVERY


_budget: ContextVar[Budget] = ContextVar("budget")
current = _budget.get


def grant() -> None:
    """Start the budget of a rendering or compilation on this thread."""
    _budget.set(Budget())


def charge(characters: int) -> None:
    budget = current()
    left = budget.left = budget.left - characters
    if left < budget.look_at:
        budget.look()


def sized(value: Any) -> Any:
    """Charge for a text or a list that was made."""
    if isinstance(value, (str, list, tuple)):
        charge(len(value))
    return value


def check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        check_bits(left.bit_length() + right.bit_length())
    for repeated, times in ((left, right), (right, left)):
        if isinstance(times, int) and isinstance(repeated, (str, list, tuple)):
            charge(max(0, times) * max(1, len(repeated)))  # before it is made


def check_bits(bits: int) -> None:
    if bits > LARGEST_INTEGER_BITS:
        raise TooMuch("it computes an integer of more than a thousand digits")


def check_format(text: str) -> None:
    """Refuse a wide one, and a width that is a field."""
    if WIDE.search(text) or re.search(r"\{[^}]*\{", text):
        raise TooMuch(f"it formats with {text[:80]!r}; a width is a number of at most 4 digits")


def check_numbers(name: str, values: Iterable[Any]) -> None:
    """Refuse a number that may be the width of what a filter or method makes."""
    if any(isinstance(value, int) and value > LARGEST_WIDTH for value in values):
        raise TooMuch(f"it calls {name} with a number above {LARGEST_WIDTH}")


def check_layout(value: Any, indent: Any) -> None:
    """Refuse JSON that is indented far or deep: some kilobytes would become megabytes of blanks."""
    wide = len(indent) if isinstance(indent, str) else indent
    if not isinstance(wide, int):
        return
    if wide > LARGEST_INDENT:
        raise TooMuch(f"it indents JSON by more than {LARGEST_INDENT}; give a smaller number")
    level = [value]
    for _ in range(DEEPEST_INDENTED + 1):
        nested = (each for each in level if isinstance(each, (dict, list, tuple)))
        level = [child for each in nested for child in (each.values() if isinstance(each, dict) else each)]
        charge(len(level))
    if level:
        raise TooMuch(f"it indents JSON that is nested deeper than {DEEPEST_INDENTED}; nest less")
