"""The line of each table and key of a TOML file, which `tomllib` does not tell.

The text is one that tomllib takes; only the beginning of each statement is read here. A value in brackets has the line
of its key.
"""

import re
import tomllib
from collections.abc import Iterator
from typing import Any, TypeAlias

Path: TypeAlias = tuple[str | int, ...]  # ("models", 0, "name")

_PART = r"""(?:[A-Za-z0-9_-]+|"(?:\\.|[^"\\\n])*"|'[^'\n]*')"""
_KEY = rf"{_PART}(?:[ \t]*\.[ \t]*{_PART})*"
_STATEMENT = re.compile(rf"[ \t]*(?:(\[\[?)[ \t]*({_KEY})[ \t]*\]\]?|({_KEY})[ \t]*=)")
# The three quotes at the end of a text may have one or two more before them, which are part of it.
_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}'
    r"|'''.*?'{3,5}"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'"
    r"|#[^\n]*"
    r"|[\[{]|[\]}]|\n|[^\"'#\[\]{}\n]+",
    re.DOTALL,
)


class Lines:
    def __init__(self, text: str) -> None:
        self._lines: dict[Path, int] = {(): 1}
        self._counts: dict[Path, int] = {}  # of `[[...]]`
        table: Path = ()
        for line, brackets, key in _statements(text):
            if brackets:
                table = self._table(key, in_list=brackets == "[[")
            path = table if brackets else (*table, *key)
            for length in range(1, len(path) + 1):
                self._lines.setdefault(path[:length], line)
            if brackets == "[":
                self._lines[table] = line  # not that of a table within it, which may come before

    def of(self, path: Path) -> int:
        """Return the line of a table or key, or of the table that it is in."""
        while path not in self._lines:
            path = path[:-1]
        return self._lines[path]

    def _table(self, key: tuple[str, ...], *, in_list: bool) -> Path:
        """`[models.resources]` is in the last one of `[[models]]`."""
        path: Path = ()
        for number, part in enumerate(key, 1):
            path = (*path, part)
            if in_list and number == len(key):
                self._counts[path] = self._counts.get(path, 0) + 1
            if path in self._counts:
                path = (*path, self._counts[path] - 1)
        return path


def _statements(text: str) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """Yield the line, the key, and between them the brackets of a table's heading, "[" or "[["; "" of a key."""
    text = text.replace("\r\n", "\n")
    position, line = 0, 1
    while position < len(text):
        found = _STATEMENT.match(text, position)
        if found is not None:
            # `a."b.c"` are two.
            key = found[2] or found[3]
            table: Any = tomllib.loads(f"{key} = 0")
            parts: list[str] = []
            while isinstance(table, dict):
                [(part, table)] = table.items()
                parts.append(part)
            yield line, found[1] or "", tuple(parts)
            position = found.end()
        end = _end(text, position)
        line += text.count("\n", position, end)
        position = end


def _end(text: str, position: int) -> int:
    """Return the start of the next statement: after the first newline outside of texts and brackets."""
    depth = 0
    while (found := _TOKEN.match(text, position)) is not None:
        position = found.end()
        token = found[0]
        if token == "\n" and depth == 0:
            return position
        depth += (token in "[{") - (token in "]}")
    return len(text)
