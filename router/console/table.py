"""A table as lines of text: its rows sorted and filtered, a cursor among them, its columns laid out in a width."""

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeAlias, TypeVar

from rich.console import Console
from rich.text import Text

from router.console.formatting import GAP, Column, cut, fitting, padded

WIDEST_NAME = 24
LEAST_TEXT = 12  # the least width of the column that takes the rest
SORTED = "cyan"
CURSOR = " on #264f78"

T = TypeVar("T")
Line: TypeAlias = list[tuple[str, str]]  # texts and their styles


def print_lines(console: Console, lines: Iterable[Line]) -> None:
    for line in lines:
        text = Text.assemble(*line, no_wrap=True, overflow="crop")
        text.rstrip()
        console.print(text)


class Table(Generic[T]):
    """`shown` are the rows that match the filter, in order; call `show` when what decides on them has changed."""

    def __init__(
        self, columns: Sequence[Column[T]], key: Callable[[T], str] = str, words: Callable[[T], str] = str
    ) -> None:
        """`key`: by which the cursor follows a row; `words`: what a filter looks at."""
        self.columns = tuple(columns)
        self.sorted_by: Column[T] | None = None  # None: in the given order
        self.reverse = False
        self.filter = ""
        self.all: Sequence[T] = ()
        self.shown: list[T] = []
        self.cursor = self.top = 0  # the row in front, and the first one that is seen
        self.cursor_key: str | None = None
        self._key, self._words = key, words

    # ---- rows

    def show(self, rows: Sequence[T] | None = None) -> None:
        """Take new rows, if given. The cursor follows its row; if the row is gone, it keeps its place."""
        self.all = self.all if rows is None else rows
        text = self.filter.strip().lower()
        self.shown = [row for row in self.all if text in self._words(row).lower()] if text else list(self.all)
        if self.sorted_by is not None:
            self.shown.sort(key=self.sorted_by.sort, reverse=self.sorted_by.descending != self.reverse)
        elif self.reverse:
            self.shown.reverse()
        places = (place for place, row in enumerate(self.shown) if self._key(row) == self.cursor_key)
        self.move_to(next(places, self.cursor))

    def sort_by_next(self, step: int, width: int) -> None:
        """Sort by the next visible column; after the last one comes the given order."""
        visible = [None, *(column for column, _ in self._layout(width))]
        at = visible.index(self.sorted_by) if self.sorted_by in visible else 0
        self.sorted_by, self.reverse = visible[(at + step) % len(visible)], False
        self.show()

    @property
    def current(self) -> T | None:
        return self.shown[self.cursor] if self.shown else None

    def move_to(self, place: int) -> None:
        self.cursor = max(0, min(place, len(self.shown) - 1))
        self.cursor_key = self._key(self.shown[self.cursor]) if self.shown else None

    # ---- lines

    def lines(self, width: int, height: int, style: str = "", *, focused: bool = False) -> list[Line]:
        """The titles and as many rows as have room, among them the cursor's; `style` replaces those of the rows."""
        rows, layout = max(0, height - 1), self._layout(width)
        self.top = max(0, self.cursor - rows + 1, min(self.top, self.cursor, len(self.shown) - rows))
        titles: Line = []
        for column, columns in layout:
            # The sorted one has an arrow: before its title, that of the first column behind it.
            arrow = "" if column is not self.sorted_by else "▼" if column.descending != self.reverse else "▲"
            title = cut(column.title, columns)
            if not titles:
                title = padded(cut(title, columns - len(arrow)) + arrow, columns)
            elif column.right:
                title = " " + padded(arrow + title, columns + 1, right=True)
            else:
                title = f" {arrow or ' '}{padded(title, columns)}"
            titles.append((title, SORTED if arrow else ""))
        lines = [titles]
        for place, row in enumerate(self.shown[self.top : self.top + rows], self.top):
            mark = CURSOR if focused and place == self.cursor else ""
            line: Line = []
            for column, columns in layout:
                text = cut(column.text(row), columns, middle=column.cut_middle)
                gap = " " * GAP * bool(line)
                line.append((gap + padded(text, columns, right=column.right), (style or column.style(row)) + mark))
            lines.append(line)
        return lines[:height]

    def _layout(self, width: int) -> list[tuple[Column[T], int]]:
        """The columns that fit, and their widths."""
        widths = {one.title: one.width for one in self.columns}
        for one in self.columns:
            if one.fit:
                longest = max((len(one.text(row)) for row in self.all), default=0)
                widths[one.title] = max(one.width, min(longest, WIDEST_NAME, width // 5))
        columns = fitting(self.columns, self.all, lambda one: widths[one.title] or LEAST_TEXT, width)
        remaining = width - sum(widths[one.title] + GAP for one in columns) + GAP
        return [(one, widths[one.title] or max(0, remaining)) for one in columns]
