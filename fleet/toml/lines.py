"""The line of each table and key of a TOML file, which `tomllib` does not tell.

The text is one that tomllib takes. What is within a value has the line of its key.
"""

import tomllib
from collections.abc import Iterator
from typing import Any, TypeAlias

Path: TypeAlias = tuple[str | int, ...]  # ("models", 0, "name")
MAX_LINES = 300  # the lines of a statement; nothing is looked for behind a longer one


class Lines:
    def __init__(self, text: str) -> None:
        self._lines: dict[Path, int] = {(): 1}
        self._counts: dict[Path, int] = {}  # the number of each `[[...]]`
        table: Path = ()
        for line, is_heading, key, value in _statements(text):
            if is_heading:
                table = self._table(key, in_list=isinstance(value, list))
            path = table if is_heading else (*table, *key)
            for length in range(1, len(path) + 1):
                self._lines.setdefault(path[:length], line)
            if is_heading:
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


def _statements(text: str) -> Iterator[tuple[int, bool, tuple[str, ...], Any]]:
    """Yield the line, whether it is a table's heading, the parts of the key, and the value.

    A statement ends with the first line up to which it can be read.
    """
    lines = text.replace("\r\n", "\n").split("\n")
    begin = 0
    for end in range(1, len(lines) + 1):
        try:
            value: Any = tomllib.loads("\n".join(lines[begin:end]))
        except tomllib.TOMLDecodeError:  # a list or text that goes on
            if end - begin > MAX_LINES:
                return
            continue
        key: list[str] = []
        while isinstance(value, dict) and len(value) == 1:
            [(part, value)] = value.items()
            key.append(part)
        if key:
            yield begin + 1, lines[begin].lstrip().startswith("["), tuple(key), value
        begin = end
