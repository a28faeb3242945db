"""Short texts for numbers, shares and durations, and the drawing of responses and tables on a console."""

import math
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TextIO, TypeVar

import click
import msgspec
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table
from rich.text import Text

NONE = "-"
PIPED_COLUMNS = 200
GAP = 2  # between the columns of a table

T = TypeVar("T")


def decoded(answer: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(answer, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise click.ClickException(f"the router's answer cannot be read: {error}; see it with --json") from error


def plain_console(file: TextIO, width: int | None = None) -> Console:
    """A console that draws text as it is: in colours on a terminal, without them elsewhere."""
    return Console(file=file, width=width, highlight=False, emoji=False, markup=False)


def table_console(file: TextIO, width: int | None = None) -> Console:
    """The same for tables, whose lines stay whole where nobody sees how wide they are."""
    return plain_console(file, width or (None if file.isatty() else PIPED_COLUMNS))


def short(number: float | None) -> str:
    """`0`, `950`, `1.2k`, `31k`, `4.7M`."""
    if number is None or not math.isfinite(number):
        return NONE
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}" if number < 9.95 * size else f"{number / size:.0f}{unit}"
    return f"{number:.0f}"


def rate(per_s: float | None) -> str:
    """`0`, `0.3`, `12`, `1.2k`."""
    if per_s is None:
        return NONE
    return f"{per_s:.1f}" if 0 < per_s < 9.95 else short(per_s)


def count_of(number: float | None) -> str:
    return NONE if number is None else f"{number:,}"


def percent(fraction: float | None) -> str:
    return NONE if fraction is None else f"{fraction:.0%}"


def ago(age_s: float | None) -> str:
    """`0.2s`, `45s`, `12m`, `3h`, `9d`."""
    if age_s is None:
        return NONE
    if age_s < 9.95:
        return f"{age_s:.1f}s"
    for unit, size, limit in (("s", 1, 100), ("m", 60, 100 * 60), ("h", 3600, 48 * 3600)):
        if age_s < limit:
            return f"{age_s / size:.0f}{unit}"
    return f"{age_s / 86400:.0f}d"


def duration(seconds: float | None) -> str:
    """`84 ms`, `1.2 s`."""
    if seconds is None or not math.isfinite(seconds):
        return NONE
    return f"{seconds * 1000:.0f} ms" if seconds < 0.9995 else f"{seconds:.1f} s"


def count(number: float, noun: str) -> str:
    return f"{number:,.0f} {noun}{'' if number == 1 else 's'}"


def cut(text: str, width: int, *, middle: bool = False) -> str:
    """Shorten to `width` cells, with an ellipsis at the end or in the middle."""
    if cell_len(text) <= width:
        return text
    if width < 2:
        return set_cell_size(text, width)
    if not middle:
        return set_cell_size(text, width - 1).rstrip() + "…"
    tail = text[-(width // 2) :]
    while cell_len(tail) > width // 2:
        tail = tail[1:]
    return f"{set_cell_size(text, width - 1 - cell_len(tail))}…{tail}"


def padded(text: str, width: int, *, right: bool = False) -> str:
    missing = " " * (width - cell_len(text))
    return missing + text if right else text + missing


# ---- tables


class Column(NamedTuple, Generic[T]):
    """A heading and one function of a row; the rest says how its value is drawn and sorted."""

    title: str
    value: Callable[[T], Any]
    form: Callable[[Any], str] = str
    width: int = 0  # 0: takes the remaining width
    drop_order: int = 0  # a narrow table leaves the highest out first; 0: never
    style: Callable[[T], str] = lambda _: ""
    right: bool = True
    fit: bool = False  # the width is that of its longest text, between `width` and a name's most
    cut_middle: bool = False  # names differ at their ends
    descending: bool = False  # sorted largest first
    mark: Callable[[T], str] = lambda _: ""  # before its text
    is_shown: Callable[[Sequence[T]], bool] | None = None  # all rows decide

    def text(self, row: T) -> str:
        return self.mark(row) + self.form(self.value(row))

    def sort(self, row: T) -> Any:
        """The row's place: names as people count, unknown numbers below all others."""
        value = self.value(row)
        return natural(value) if isinstance(value, str) else -1.0 if value is None else value


@lru_cache(10_000)
def natural(name: str) -> list[tuple[int, str]]:
    """Sort key of a name: `demo-10` comes after `demo-9`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d{1,18})", name)]


def fitting(
    columns: Sequence[Column[T]], items: Sequence[T], width_of: Callable[[Column[T]], int], room: int
) -> list[Column[T]]:
    """Leave out columns that these rows do not need, and then the most dispensable ones until the others fit."""
    kept = [one for one in columns if one.is_shown is None or one.is_shown(items)]
    while sum(width_of(one) + GAP for one in kept) - GAP > room:
        least = max(kept, key=lambda one: one.drop_order)
        if not least.drop_order:
            break
        kept.remove(least)
    return kept


def table_of(columns: Sequence[Column[T]], items: Sequence[T], room: int, header_style: str = "") -> Table:
    """Draw the columns that fit, each as wide as its texts; where even the last ones do not fit, names are folded."""

    def width_of(column: Column[T]) -> int:
        return max(map(cell_len, (column.title, *map(column.text, items))))

    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style=header_style)
    kept = fitting(columns, items, width_of, room)
    for number, one in enumerate(kept):
        table.add_column(one.title, justify="right" if one.right else "left", no_wrap=number > 0, overflow="fold")
    for item in items:
        table.add_row(*(Text(one.text(item), one.style(item)) for one in kept))
    return table


# ---- drawings of one line

PARTS = " ▏▎▍▌▋▊▉█"


def bar(share: float | None, width: int) -> str:
    """A share as a bar of this many columns, in eighths of one."""
    if share is None:
        return " " * width
    full, part = divmod(round(min(1.0, max(0.0, share)) * width * 8), 8)
    return ("█" * full + (PARTS[part] if part else "")).ljust(width)
