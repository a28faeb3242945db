"""The widget of a table: draws the visible lines, and redraws only those that changed."""

import textwrap
from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar, Generic, TypeVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from router.console.top.table import Segments, Table

T = TypeVar("T")

HEAD = 1  # line of titles
TITLE = Style(bgcolor="#2b2b2b", bold=True)
CURSOR = Style(bgcolor="#264f78")
STALE = Style(dim=True)
parsed = lru_cache(64)(Style.parse)


class TableView(ScrollView, Generic[T], can_focus=True):
    """A table with a fixed line of titles and a row as its cursor."""

    DEFAULT_CSS = "TableView { overflow-x: hidden; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("home,g", "edge(-1)", show=False),
        Binding("end,G", "edge(1)", show=False),
        Binding("enter", "select", show=False),
    ]

    class Selected(Message):
        """The user opens the current row."""

        def __init__(self, view: "TableView[T]") -> None:
            super().__init__()
            self.view = view

    def __init__(self, table: Table[T], name: str) -> None:
        super().__init__(id=name)
        self.table = table
        self.placeholder = ""  # shown if there are no rows
        self.is_stale = False
        self._drawn: dict[int, Segments] = {}  # by line of the widget

    # ---- drawing

    def show(self, items: Sequence[T], placeholder: str, *, is_stale: bool) -> None:
        follow = self._is_cursor_visible()
        self.table.show(items)
        self.placeholder, was_stale, self.is_stale = placeholder, self.is_stale, is_stale
        self.redraw(keep=was_stale == is_stale)
        if follow and not self._is_cursor_visible():
            self._scroll_to_cursor()

    def redraw(self, *, keep: bool = True) -> None:
        """Draw the rows; `keep` lines that did not change."""
        size = Size(self.size.width, HEAD + len(self.table.shown))
        if self.virtual_size != size:
            self.virtual_size = size
        if not keep:
            self.refresh()
            return
        for line in range(self.size.height):
            if self._drawn.get(line) != self._line(line):
                self.refresh(Region(0, line, self.size.width, 1))

    def _line(self, line: int) -> Segments:
        """The segments of a line of the widget, with a mark for titles and cursor."""
        width = self.scrollable_content_region.width
        if line < HEAD:
            return [*self.table.head(width), ("", "head")]
        row = line - HEAD + round(self.scroll_offset.y)
        shown = self.table.shown
        if row < len(shown):
            mark = [("", "cursor")] if row == self.table.cursor and self.has_focus else []
            return [*self.table.line(shown[row], width), *mark]
        placeholder = [] if shown else textwrap.wrap(self.placeholder, max(1, width))
        return [(placeholder[row], "dim")] if row < len(placeholder) else []

    def render_line(self, y: int) -> Strip:
        segments = self._drawn[y] = self._line(y)
        base = TITLE if y < HEAD else CURSOR if segments and segments[-1] == ("", "cursor") else Style.null()
        if self.is_stale and y >= HEAD:
            base += STALE
        plain = self.is_stale
        drawn = [
            Segment(text, parsed(style) + base if style and not plain else base) for text, style in segments if text
        ]
        # The cursor goes from edge to edge, also where the row is shorter.
        return Strip(drawn).adjust_cell_length(self.size.width, base).apply_style(self.rich_style)

    # ---- the cursor

    def on_focus(self) -> None:
        self.redraw()

    def on_blur(self) -> None:
        self.redraw()

    def on_resize(self) -> None:
        self._drawn.clear()
        self.redraw(keep=False)
        self._scroll_to_cursor()

    def action_move(self, rows: int) -> None:
        self.table.move_to(self.table.cursor + rows)
        self._scroll_to_cursor()

    def action_page(self, pages: int) -> None:
        self.action_move(pages * max(1, self.size.height - HEAD - 1))

    def action_edge(self, side: int) -> None:
        self.table.move_to(0 if side < 0 else len(self.table.shown))
        self._scroll_to_cursor()

    def action_select(self) -> None:
        if self.table.current is not None:
            self.post_message(self.Selected(self))

    def _is_cursor_visible(self) -> bool:
        top = round(self.scroll_offset.y)
        return top <= self.table.cursor < top + self.size.height - HEAD

    def _scroll_to_cursor(self) -> None:
        rows, top, cursor = max(1, self.size.height - HEAD), round(self.scroll_offset.y), self.table.cursor
        self.scroll_to(y=max(cursor - rows + 1, min(top, cursor)), animate=False)
        self.redraw()

    def on_click(self, event: events.Click) -> None:
        row = event.y - HEAD + round(self.scroll_offset.y)
        is_double_click = row == self.table.cursor and event.chain == 2
        if event.y >= HEAD and row < len(self.table.shown):
            self.table.move_to(row)
            self.redraw()
            if is_double_click:
                self.action_select()
