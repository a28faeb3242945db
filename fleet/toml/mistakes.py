"""A mistake in a fleet.toml: what is wrong, and on which line, which `tomllib` does not tell."""

import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, TypeAlias


class Mistake(ValueError):
    """`where`: the keys that lead to it."""

    def __init__(self, message: str, *where: str | int) -> None:
        super().__init__(message)
        self.where = where


@contextmanager
def within(*where: str | int) -> Iterator[None]:
    """Say of the mistakes of a table where that table is."""
    try:
        yield
    except Mistake as error:
        raise Mistake(str(error), *where, *error.where) from error


def shown(value: object) -> str:
    """Return a value as TOML writes it, cut if it is long."""
    text = str(value).lower() if isinstance(value, bool) else repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def nearest(key: str, known: Sequence[str], otherwise: str) -> str:
    near = get_close_matches(key, known, n=1)
    return f"did you mean {near[0]!r}?" if near else otherwise


Path: TypeAlias = tuple[str | int, ...]  # ("models", 0, "name")


def line_of(text: str, where: Path) -> int:
    """Return the line where a table or key begins, or the table that it is in. `text` is one that tomllib takes.

    What is within a value has the line of its key.
    """
    lines = text.split("\n")
    content = tomllib.loads(text)
    while not _has(content, where):
        where = where[:-1]
    without, found = 0, len(lines)  # the first `without` lines lack it, the first `found` have it
    while found - without > 1:
        middle = (without + found) // 2
        end, content = _parsed(lines, middle)
        if _has(content, where):
            found = end
        else:
            without = middle
    return _parsed(lines, found - 1)[0] + 1 if where else 1


def _parsed(lines: list[str], count: int) -> tuple[int, dict[str, Any]]:
    """Read the first lines up to the end of a statement: how many these are, and what they say."""
    while True:
        try:
            return count, tomllib.loads("\n".join(lines[:count]))
        except tomllib.TOMLDecodeError:  # a list or text that goes on
            count -= 1


def _has(content: Any, where: Path) -> bool:
    try:
        for step in where:
            content = content[step]
    except (KeyError, IndexError, TypeError):
        return False
    return True
