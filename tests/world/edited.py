"""Files that an operator edits while the router watches them, and what of them may be in force at a time."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from router.tenants.keys import Key, parse_keys
from tests.world.loop import WorldLoop

T = TypeVar("T")
Tables: TypeAlias = Mapping[str, Mapping[str, Any]]  # fields by name

LOOKS_S = 2.1  # the router's second look at a change has come by then
BROKEN = "", "[", "unknown = 1\n"


class EditedFile(Generic[T]):
    """A TOML file with a table of this `title` for each of `tables`; `parse` reads it as the router does."""

    def __init__(
        self, path: Path, title: str, tables: Tables, parse: Callable[[str, str], Mapping[str, T]], loop: WorldLoop
    ) -> None:
        self.tables = tables  # as they are while nobody changes them
        self.is_edited = False
        self.path, self._title, self._parse, self.loop = path, title, parse, loop
        self._versions: list[tuple[float, Mapping[str, T] | None]] = []  # with the times of writing; None: broken
        self.write(tables)

    def write(self, tables: Tables) -> None:
        self._replace(text := "".join(table(self._title.format(name), tables[name]) for name in tables))
        self._versions.append((self.loop.time(), self._parse(str(self.path), text)))

    def break_(self, text: str) -> None:
        """Replace it by a text that no router can use."""
        self._replace(text)
        self._versions.append((self.loop.time(), None))

    def mend(self) -> None:
        """Write it whole if it is broken, as whoever starts a router does."""
        if self._versions[-1][1] is None:
            self.write(self.tables)

    def in_force(self, from_s: float, to_s: float) -> list[Mapping[str, T]]:
        """The versions that the router may go by at some moment between these, the newest first."""
        found, replaced_s = list[Mapping[str, T]](), from_s
        for written_s, named in reversed(self._versions):
            if written_s <= to_s:
                if named is not None:
                    found.append(named)
                    if replaced_s - written_s > LOOKS_S:
                        break
                replaced_s = min(replaced_s, written_s)
        return found

    @property
    def versions(self) -> list[Mapping[str, T]]:
        return [named for _, named in self._versions if named is not None]

    def _replace(self, text: str) -> None:
        fresh = self.path.with_suffix(".new")
        fresh.write_text(text)
        stamp = round(self.loop.time() * 1e9)  # by the machine's clock, two versions may be of one moment or not
        os.utime(fresh, ns=(stamp, stamp))
        fresh.replace(self.path)


def keys_by_name(path: str, text: str) -> dict[str, Key]:
    return {key.name: key for key in parse_keys(path, text)}


def table(title: str, fields: Mapping[str, Any]) -> str:
    lines = [f"{field} = {msgspec.json.encode(value).decode()}" for field, value in fields.items() if value is not None]
    return "\n".join([f"[{title}]", *lines, "", ""])
