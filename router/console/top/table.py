"""A table without a terminal: sorts and filters rows, and lays them out in a width."""

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from router.console.formatting import GAP, Column, cut, fitting, padded

WIDEST_NAME = 24
LEAST_TEXT = 12  # of the column that takes the remaining width

SORTED = "cyan"

T = TypeVar("T")
Segments = list[tuple[str, str]]  # text and its style


class Placed(NamedTuple, Generic[T]):
    column: Column[T]
    width: int


class Table(Generic[T]):
    """`shown` are the rows of the last `show` that match the filter, in order."""

    def __init__(self, columns: Sequence[Column[T]], key: Callable[[T], str], search_text: Callable[[T], str]) -> None:
        self.columns = tuple(columns)
        self.key = key
        self.sorted_by: int | None = None  # None: in the given order
        self.reverse = False
        self.filter = ""
        self.all: Sequence[T] = ()
        self.shown: list[T] = []
        self.cursor = 0
        self.cursor_key: str | None = None
        self._search_text = search_text
        self._layout: tuple[int, list[Placed[T]]] | None = None

    # ---- rows

    def show(self, items: Sequence[T]) -> None:
        """Take new rows. The cursor follows its row; if the row is gone, it keeps its place."""
        self.all = items
        self._layout = None
        text = self.filter.lower()
        self.shown = [item for item in items if text in self._search_text(item).lower()] if text else list(items)
        if self.sorted_by is not None:
            column = self.columns[self.sorted_by]
            self.shown.sort(key=column.sort, reverse=column.descending != self.reverse)
        elif self.reverse:
            self.shown.reverse()
        keys = [self.key(item) for item in self.shown]
        self.move_to(keys.index(self.cursor_key) if self.cursor_key in keys else self.cursor)

    def set_filter(self, text: str) -> None:
        self.filter = text.strip()
        self.show(self.all)

    def toggle_order(self) -> None:
        self.reverse = not self.reverse
        self.show(self.all)

    def sort_by(self, number: int | None) -> None:
        """Sort by a column; the same column again reverses the order."""
        self.reverse = number == self.sorted_by and not self.reverse
        self.sorted_by = number
        self.show(self.all)

    def sort_by_next(self, step: int, width: int) -> None:
        """Sort by the next visible column; after the last one comes the given order."""
        visible: list[int | None] = [None, *(self.columns.index(one.column) for one in self.layout(width))]
        at = visible.index(self.sorted_by) if self.sorted_by in visible else 0
        self.sorted_by, self.reverse = visible[(at + step) % len(visible)], False
        self.show(self.all)

    # ---- the cursor

    @property
    def current(self) -> T | None:
        return self.shown[self.cursor] if self.shown else None

    def move_to(self, row: int) -> None:
        self.cursor = max(0, min(row, len(self.shown) - 1))
        self.cursor_key = self.key(self.shown[self.cursor]) if self.shown else None

    # ---- lines

    def layout(self, width: int) -> list[Placed[T]]:
        if self._layout is None or self._layout[0] != width:
            widths = {one.title: self._width(one, width) for one in self.columns}
            columns = fitting(self.columns, self.all, lambda one: widths[one.title] or LEAST_TEXT, width)
            remaining = width - sum(widths[one.title] + GAP for one in columns) + GAP
            self._layout = width, [Placed(one, widths[one.title] or max(0, remaining)) for one in columns]
        return self._layout[1]

    def _width(self, column: Column[T], width: int) -> int:
        if not column.fit:
            return column.width
        most = max(column.width, min(WIDEST_NAME, width // 5))
        return max(column.width, min(most, max((len(self._text(column, item)) for item in self.all), default=0)))

    def head(self, width: int) -> Segments:
        """The line of titles. An arrow marks the sorted column, in the gap before a right-aligned title."""
        segments: Segments = []
        for column, columns in self.layout(width):
            sorted_here = self.sorted_by is not None and self.columns[self.sorted_by] is column
            arrow = ("▼" if column.descending != self.reverse else "▲") if sorted_here else ""
            gap = " " * GAP if segments else ""
            if column.right and len(column.title + arrow) <= columns:
                title = arrow + column.title
            elif column.right and segments:
                title, gap = cut(column.title, columns), gap[: GAP - len(arrow)] + arrow
            else:
                title = cut(column.title, columns - len(arrow)) + arrow
            style = SORTED if sorted_here else ""
            segments += [(gap, style)] * bool(gap)
            segments.append((padded(title, columns, right=column.right), style))
        return segments

    def line(self, item: T, width: int) -> Segments:
        segments: Segments = []
        for column, columns in self.layout(width):
            text = cut(self._text(column, item), columns, middle=column.cut_middle)
            gap = [(" " * GAP, "")] if segments else []
            segments += [*gap, (padded(text, columns, right=column.right), column.style(item))]
        return segments

    def _text(self, column: Column[T], item: T) -> str:
        text = column.text if self.sorted_by is None or column.sorted_text is None else column.sorted_text
        return text(item)
