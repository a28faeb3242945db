"""The tools' output: for people, or one JSON object a line."""

import sys
from collections.abc import Mapping
from typing import Any

import msgspec
from rich.console import Console, RenderableType
from rich.table import Table

_encode_json = msgspec.json.Encoder().encode


class Output:
    """Results go to stdout; notes about how it goes to stderr, so that a pipe gets results only."""

    def __init__(self, as_json: bool = False) -> None:
        self.json = as_json
        self.console = Console(highlight=False, soft_wrap=True)
        self.notes = Console(stderr=True, highlight=False, soft_wrap=True)

    def line(self, fields: Mapping[str, Any]) -> None:
        """Print one JSON line and flush it, for readers of a live stream."""
        sys.stdout.write(to_json(fields) + "\n")
        sys.stdout.flush()

    def show(self, text: RenderableType) -> None:
        self.console.print(text)

    def note(self, text: str) -> None:
        self.notes.print(text, markup=False)


def to_json(value: Any) -> str:
    return _encode_json(plain(value)).decode()


def plain(value: Any) -> Any:
    """The value with structs as objects and bytes as {"$hex": ...}."""
    if isinstance(value, bytes | bytearray | memoryview):
        return {"$hex": value.hex()}
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return value


def count(number: int, noun: str) -> str:
    """`1 batch`, `2,048 batches`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}{'es' if noun.endswith(('ch', 's')) else 's'}"


def grid() -> Table:
    """Names at the left, one line of text for each at the right, cut at the width of the terminal."""
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(no_wrap=True, style="dim", min_width=12)
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    return table
