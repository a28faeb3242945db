"""A table of a TOML file that is taken apart key by key, and remembers what is wrong, with the line it stands on."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fleet.plan import LONGEST_S
from fleet.toml.lines import Lines, Path
from fleet.toml.options import nearest, shown

LONGEST_MESSAGE = 500
MOST_SHOWN = 50


class Mistakes:
    """Of one file."""

    def __init__(self, file: str, lines: Lines) -> None:
        self._file = file
        self._lines = lines
        self._found: dict[tuple[int, str], None] = {}

    def note(self, where: Path, message: str) -> None:
        if len(message) > LONGEST_MESSAGE:
            message = f"{message[: LONGEST_MESSAGE - 3]}..."
        self._found[self._lines.of(where), message] = None

    def line(self, where: Path) -> int:
        return self._lines.of(where)

    def __str__(self) -> str:
        """The first of them, in the order of their lines, and how many more there are; empty if there are none."""
        lines = [f"{self._file}, line {line}: {message}" for line, message in sorted(self._found)[:MOST_SHOWN]]
        more = len(self._found) - len(lines)
        return "\n".join([*lines, f"There are {more} more mistakes."] if more else lines)


class Section:
    """Every method that returns a key's value notes what is wrong with it, and then returns what stands for none."""

    def __init__(self, where: Path, values: Mapping[str, Any], mistakes: Mistakes) -> None:
        self.where = where
        self.values = values
        self.mistakes = mistakes

    def note(self, key: str | None, message: str) -> None:
        self.mistakes.note(self.where if key is None else (*self.where, key), message)

    def line(self, key: str) -> int:
        return self.mistakes.line((*self.where, key))

    def only(self, known: Collection[str]) -> None:
        unknown = [key for key in self.values if key not in known]
        for key in unknown[:MOST_SHOWN]:
            name = ".".join(str(part) for part in self.where if isinstance(part, str)) or "the file"
            fix = nearest(key, sorted(known), f"the keys of {name} are {', '.join(known)}")
            self.note(key, f"{key!r} is not known here; {fix}")
        for key in unknown[MOST_SHOWN:]:
            self.note(key, f"{key!r} is not known here")

    def text(self, key: str) -> str | None:
        value = self.values.get(key)
        if value is None or (isinstance(value, str) and value):
            return value
        self._wrong(key, "a text in quotes, or leave it out" if value == "" else "a text in quotes")
        return None

    def choice(self, key: str, known: Sequence[str], default: str) -> str | None:
        value = self.values.get(key, default)
        if value in known:
            return str(value)
        listed = f"write {', '.join(known[:-1])} or {known[-1]}"
        fix = nearest(value, known, listed) if isinstance(value, str) else listed
        self.note(key, f"{key} is {shown(value)}; {fix}")
        return None

    def flag(self, key: str) -> bool:
        value = self.values.get(key, False)
        if isinstance(value, bool):
            return value
        self._wrong(key, "true or false")
        return False

    def whole(self, key: str, default: int, least: int, most: int | None = None) -> int:
        value = self.values.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            self._wrong(key, f"a whole number, {least} or more")
            return default
        if most is not None and value > most:
            self._wrong(key, f"{most} or less")
            return default
        return value

    def number(self, key: str, default: float, most: float, *, least: float = 0.0, above: bool = False) -> float:
        """Of `least` or more, or above it."""
        value = self.values.get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or value < least or (value == least and above):
            self._wrong(key, f"a number above {least:g}" if above else f"a number, {least:g} or more")
            return default
        if value > most:
            self._wrong(key, f"{most:g} or less")
            return default
        return float(value)

    def seconds(self, key: str, default: float, *, least: float = 0.0) -> float:
        return self.number(key, default, LONGEST_S, least=least)

    def texts(self, key: str) -> tuple[str, ...]:
        value = self.values.get(key, [])
        if isinstance(value, list) and all(isinstance(item, str) and item for item in value):
            return tuple(value)
        self._wrong(key, "a list of texts: ['one', 'two']")
        return ()

    def table(self, key: str) -> "Section":
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            self._wrong(key, f"a table: {key} = {{...}}")
            value = {}
        return Section((*self.where, key), value, self.mistakes)

    def _wrong(self, key: str, fix: str) -> None:
        self.note(key, f"{key} is {shown(self.values.get(key))}; write {fix}")
