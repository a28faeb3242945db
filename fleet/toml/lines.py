"""The line of a table or key in a TOML file, which `tomllib` does not tell."""

import tomllib
from typing import Any, TypeAlias

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
