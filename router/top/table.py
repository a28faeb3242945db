"""Rows as they are sorted, filtered and cut to a width: a table without a terminal."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from router.top.words import cut, padded

GAP = 2
WIDEST_NAME = 24
LEAST_TEXT = 12  # of a column that takes what is left

SORTED = "cyan"

T = TypeVar("T")
Segments = list[tuple[str, str]]  # text and its style


def unstyled(_: object) -> str:
    return ""


class Column(NamedTuple, Generic[T]):
    title: str
    text: Callable[[T], str]
    sort: Callable[[T], Any]
    width: int = 0  # 0: takes what is left
    right: bool = True
    dispensable: int = 0  # the highest goes first where there is no room; 0: never
    style: Callable[[T], str] = unstyled
    measured: bool = False  # as wide as its longest text, between `width` and WIDEST_NAME
    name: bool = False  # cut in its middle: names differ at their ends
    falling: bool = False  # the largest is wanted first
    sorted_text: Callable[[T], str] | None = None  # where rows do not come as they are
    tells: Callable[[Sequence[T]], bool] | None = None  # left out where it says nothing of these


class Placed(NamedTuple, Generic[T]):
    column: Column[T]
    width: int


class Table(Generic[T]):
    """`shown` is what is to be seen of what was last given to `show`."""

    def __init__(
        self,
        columns: Sequence[Column[T]],
        key: Callable[[T], str],
        words: Callable[[T], str],
        *,
        newest_first: bool = False,
    ) -> None:
        self.columns = tuple(columns)
        self.key = key
        self.sorted_by: int | None = None  # None: as they come
        self.reverse = False
        self.filter = ""
        self.all: Sequence[T] = ()
        self.shown: list[T] = []
        self.at: str | None = None  # the key of the row under the cursor
        self.place = 0  # and where that is
        self._words = words
        self._newest_first = newest_first  # who looks at the first row wants to see what comes
        self._layout: tuple[int, list[Placed[T]]] | None = None

    # ---- what there is

    def show(self, items: Sequence[T]) -> None:
        """The cursor stays on its row, wherever that is now; if it is gone, where it was."""
        self.all = items
        self._layout = None
        wanted = self.filter.lower()
        self.shown = [item for item in items if wanted in self._words(item).lower()] if wanted else list(items)
        if self.sorted_by is not None:
            column = self.columns[self.sorted_by]
            self.shown.sort(key=column.sort, reverse=column.falling != self.reverse)
        elif self.reverse:
            self.shown.reverse()
        keys = [self.key(item) for item in self.shown]
        if self.at in keys and not (self._newest_first and self.place == 0):
            self.place = keys.index(self.at)
        else:
            self.move_to(self.place)

    def use(self, filter_text: str) -> None:
        self.filter = filter_text.strip()
        self.show(self.all)

    def turn(self) -> None:
        self.reverse = not self.reverse
        self.show(self.all)

    def sort_by(self, number: int | None) -> None:
        """By the same once more: the other way round."""
        self.reverse = number == self.sorted_by and not self.reverse
        self.sorted_by = number
        self.show(self.all)

    def sort_beside(self, step: int, width: int) -> None:
        """By the next column that can be seen, or as they come, round and round."""
        seen: list[int | None] = [None, *(self.columns.index(one.column) for one in self.layout(width))]
        at = seen.index(self.sorted_by) if self.sorted_by in seen else 0
        self.sorted_by, self.reverse = seen[(at + step) % len(seen)], False
        self.show(self.all)

    # ---- the cursor

    @property
    def current(self) -> T | None:
        return self.shown[self.place] if self.shown else None

    def move_to(self, place: int) -> None:
        self.place = max(0, min(place, len(self.shown) - 1))
        self.at = self.key(self.shown[self.place]) if self.shown else None

    # ---- lines of so many columns

    def layout(self, width: int) -> list[Placed[T]]:
        if self._layout is None or self._layout[0] != width:
            self._layout = width, self._fitting(width)
        return self._layout[1]

    def _fitting(self, width: int) -> list[Placed[T]]:
        columns = [one for one in self.columns if one.tells is None or one.tells(self.all)]
        widths = {one.title: self._width(one, width) for one in columns}
        while True:
            taken = sum(max(widths[one.title], 0 if one.width else LEAST_TEXT) + GAP for one in columns) - GAP
            least = max(columns, key=lambda one: one.dispensable)
            if taken <= width or not least.dispensable:
                break
            columns.remove(least)
        left = width - sum(widths[one.title] + GAP for one in columns) + GAP
        return [Placed(one, widths[one.title] or max(0, left)) for one in columns]

    def _width(self, column: Column[T], width: int) -> int:
        if not column.measured:
            return column.width
        most = max(column.width, min(WIDEST_NAME, width // 5))
        return max(column.width, min(most, max((len(self._text(column, item)) for item in self.all), default=0)))

    def head(self, width: int) -> Segments:
        """The titles; an arrow is where it is sorted, in the gap before a title that has its place to the right."""
        segments: Segments = []
        for column, columns in self.layout(width):
            sorted_here = self.sorted_by is not None and self.columns[self.sorted_by] is column
            arrow = ("▼" if column.falling != self.reverse else "▲") if sorted_here else ""
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
            text = cut(self._text(column, item), columns, middle=column.name)
            segments.append((padded(text, columns, right=column.right), column.style(item)))
        return _spaced(segments)

    def _text(self, column: Column[T], item: T) -> str:
        text = column.text if self.sorted_by is None or column.sorted_text is None else column.sorted_text
        return text(item)

    def column_at(self, x: int, width: int) -> int | None:
        """Which column is there, for who clicks on its title."""
        begin = 0
        for column, columns in self.layout(width):
            if begin <= x < begin + columns + GAP:
                return self.columns.index(column)
            begin += columns + GAP
        return None


def _spaced(segments: Segments) -> Segments:
    spaced: Segments = []
    for number, segment in enumerate(segments):
        spaced += [(" " * GAP, ""), segment] if number else [segment]
    return spaced
