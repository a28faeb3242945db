"""The budget of a chat template: characters that it may make, and time.

Every round of a loop, every call of a macro, and every value that is made costs some. The clock is looked at as the
budget is spent. Nothing that takes long or grows stands between two costs: numbers, widths and repetitions are looked
at before.
"""

import re
import time
from collections.abc import ItemsView, Iterable, KeysView, Mapping, Sequence, ValuesView
from contextvars import ContextVar
from string import Formatter
from typing import Any

import jinja2
import jinja2.utils

MOST_CHARACTERS = 128 * 1024 * 1024  # made by one rendering, in all
MOST_SECONDS = 2.0
STEP_CHARACTERS = 64  # the cost of a round or a call
LOOK_EVERY = 4096  # characters: then the clock is looked at
LARGEST_INTEGER_BITS = 4096
LARGEST_WIDTH = 4096  # of what is padded, indented or wrapped
LARGEST_INDENT = 16  # of JSON
DEEPEST_INDENTED = 32  # values in values: each line begins with as many indents
WIDE = re.compile(r"\d{5,}|\*")  # a width in a format


class TooMuch(jinja2.TemplateError):
    """The template exceeded its budget."""


class Budget:
    """The budget left to one rendering."""

    __slots__ = ("left", "look_at", "until_s")

    def __init__(self) -> None:
        self.left = MOST_CHARACTERS
        self.look_at = MOST_CHARACTERS - LOOK_EVERY
        self.until_s = time.monotonic() + MOST_SECONDS

    def look(self, wanted: int = 0) -> None:
        if self.left < wanted:
            raise TooMuch(f"it makes more than {MOST_CHARACTERS} characters of them")
        if time.monotonic() > self.until_s:
            raise TooMuch(f"it takes longer than {MOST_SECONDS:g} s")
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
    """Charge for a value: a text, or a container of values charged before."""
    if isinstance(value, (str, *CONTAINERS)):
        charge(len(value))
    return value


def built(value: Any) -> Any:
    """Charge for a new container, including its nested containers: none can double without end."""
    charge(weight_of(value))
    return value


CONTAINERS = (list, tuple, dict, set, frozenset, KeysView, ValuesView, ItemsView)


def weight_of(value: Any, *, texts: bool = False) -> int:
    """The number of nested values, counted repeatedly; with `texts`, about the length of the written value."""
    weight, look_at, pending = 0, LOOK_EVERY, [value]
    while pending:
        each = pending.pop()
        weight += len(each) + 4 if texts and isinstance(each, str) else 1
        if isinstance(each, jinja2.utils.Namespace):
            each = each._Namespace__attrs
        if isinstance(each, dict):
            pending += each.values()
            if texts:
                pending += each
        elif isinstance(each, CONTAINERS):
            pending += each
        elif isinstance(each, int) and each.bit_length() > LARGEST_INTEGER_BITS:
            raise TooMuch("it makes an integer of more than a thousand digits")
        if weight > look_at:
            current().look(weight)
            look_at = weight + LOOK_EVERY
    return weight


def size_of(value: Any) -> int:
    """The cost of comparing or hashing the value."""
    if type(value) is str:
        return len(value) + 1
    return weight_of(value, texts=True) if isinstance(value, (str, *CONTAINERS)) else 1


def check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > LARGEST_INTEGER_BITS:
            raise TooMuch("it multiplies integers to more than a thousand digits")
        return
    for repeated, times in ((left, right), (right, left)):
        if isinstance(times, int) and isinstance(repeated, (str, list, tuple)):
            charge(max(0, times) * max(1, len(repeated)))  # before it is made


def check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > LARGEST_INTEGER_BITS:
        raise TooMuch("it computes a power of more than a thousand digits")


def check_format(text: str, mark: str, values: Iterable[Any]) -> None:
    if WIDE.search(text):
        raise TooMuch(f"it formats with {text[:80]!r}; a width has at most 4 digits")
    if mark == "{" and any("{" in (form or "") for _, _, form, _ in Formatter().parse(text)):
        raise TooMuch(f"it formats with {text[:80]!r}; a width is a number, not a field")
    charge(text.count(mark) * sum(weight_of(value, texts=True) for value in values))


def check_arguments(name: str, of: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Charge for the result of a method or filter that may be much larger than its input."""
    values = (*args, *kwargs.values())
    if any(isinstance(value, int) and value > LARGEST_WIDTH for value in values):
        raise TooMuch(f"it calls {name} with a number above {LARGEST_WIDTH}")
    if not isinstance(of, str):
        return
    if name in ("format", "format_map"):
        check_format(of, "%" if name == "format" and "{" not in of else "{", values)
    elif name == "replace" and values[1:] and isinstance(values[0], str):
        charge(of.count(values[0]) * len(str(values[1])))
    elif name == "join" and args and isinstance(args[0], list):
        charge(len(args[0]) * len(of) + weight_of(args[0], texts=True))
    elif name == "translate" and args:
        charge(len(of) * _longest(args[0]))
    elif name in ("indent", "wordwrap", "expandtabs"):
        widest = max((len(value) if isinstance(value, str) else LARGEST_WIDTH for value in values), default=8)
        charge((of.count("\n") + of.count("\t") + 1) * widest)


def check_sum(_attribute: Any = None, start: Any = 0) -> None:
    """Require numbers in a sum that starts with a number: adding lists would copy them again and again."""
    if not isinstance(start, (int, float)):
        raise TooMuch(f"it sums from {type(start).__name__}; give a number")


def _longest(table: Any) -> int:
    """The length of the longest text that `translate` may substitute for a character."""
    if not isinstance(table, dict):
        raise TooMuch(f"it translates with {type(table).__name__}; give a dict")
    charge(len(table))
    return max((len(text) for text in table.values() if isinstance(text, str)), default=1)


def check_layout(value: Any, indent: int | None, separators: tuple[str, str] | None) -> None:
    """Charge for the separators in JSON; the values are charged, so their number is bounded."""
    if indent is None and separators is None:
        return
    if isinstance(indent, str) or (isinstance(indent, int) and indent > LARGEST_INDENT):
        raise TooMuch(f"it indents JSON by {str(indent)[:80]!r}; give a number of at most {LARGEST_INDENT}")
    between = sum(map(len, separators)) if separators else len(", : ")
    indent = max(0, indent) if isinstance(indent, int) else 0
    level, depth = [value], 0
    while level:
        if indent and depth > DEEPEST_INDENTED:
            raise TooMuch(f"it indents JSON that is nested deeper than {DEEPEST_INDENTED}; nest less")
        charge(len(level) * (between + indent * depth))
        nested = (each for each in level if isinstance(each, (dict, list, tuple)))
        level = [child for each in nested for child in (each.values() if isinstance(each, dict) else each)]
        depth += 1
