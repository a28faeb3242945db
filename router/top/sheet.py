"""A table on the terminal: draws the lines that can be seen, and of these again only the ones that changed."""

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

from router.top.table import Segments, Table

T = TypeVar("T")

HEAD = 1  # line of titles
TITLE = Style(bgcolor="#2b2b2b", bold=True)
CURSOR = Style(bgcolor="#264f78")
OLD = Style(dim=True)
parsed = lru_cache(64)(Style.parse)


class Sheet(ScrollView, Generic[T], can_focus=True):
    """The first line has the titles and does not scroll; the cursor is a row."""

    DEFAULT_CSS = "Sheet { overflow-x: hidden; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("home,g", "edge(-1)", show=False),
        Binding("end,G", "edge(1)", show=False),
        Binding("enter", "look_into", show=False),
    ]

    class LookInto(Message):
        """Somebody wants to see more of the current row."""

        def __init__(self, sheet: "Sheet[T]") -> None:
            super().__init__()
            self.sheet = sheet

    def __init__(self, table: Table[T], name: str) -> None:
        super().__init__(id=name)
        self.table = table
        self.nothing = ""  # what stands there instead of rows
        self.is_old = False
        self._drawn: dict[int, Segments] = {}  # by line of the widget, what it shows

    # ---- what is shown

    def show(self, items: Sequence[T], nothing: str, *, is_old: bool) -> None:
        followed = self._sees_cursor()
        self.table.show(items)
        self.nothing, was_old, self.is_old = nothing, self.is_old, is_old
        self.rearranged(keep=was_old == is_old)
        if followed and not self._sees_cursor():
            self._follow()

    def rearranged(self, *, keep: bool = True) -> None:
        """Rows came, went or changed; `keep` what is on the screen and still true."""
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
        """What is to be seen there; the cursor is a part of it."""
        width = self.scrollable_content_region.width
        if line < HEAD:
            return [*self.table.head(width), ("", "head")]
        row = line - HEAD + round(self.scroll_offset.y)
        shown = self.table.shown
        if row < len(shown):
            mark = [("", "cursor")] if row == self.table.place and self.has_focus else []
            return [*self.table.line(shown[row], width), *mark]
        instead = [] if shown else textwrap.wrap(self.nothing, max(1, width))
        return [(instead[row], "dim")] if row < len(instead) else []

    def render_line(self, y: int) -> Strip:
        segments = self._drawn[y] = self._line(y)
        base = TITLE if y < HEAD else CURSOR if segments and segments[-1] == ("", "cursor") else Style.null()
        if self.is_old and y >= HEAD:
            base += OLD
        drawn = [Segment(text, self._style(style, base)) for text, style in segments if text]
        # Cells that the row does not fill belong to it as well: a cursor goes from edge to edge.
        whole = Strip(drawn).adjust_cell_length(self.size.width, base)
        return whole.apply_style(self.rich_style)

    def _style(self, style: str, base: Style) -> Style:
        if not style or self.is_old:
            return base
        return parsed(style) + base

    # ---- where the cursor is

    def on_focus(self) -> None:
        self.rearranged()

    def on_blur(self) -> None:
        self.rearranged()

    def on_resize(self) -> None:
        self._drawn.clear()
        self.rearranged(keep=False)
        self._follow()

    def action_move(self, rows: int) -> None:
        self.table.move_to(self.table.place + rows)
        self._follow()

    def action_page(self, pages: int) -> None:
        self.action_move(pages * max(1, self.size.height - HEAD - 1))

    def action_edge(self, side: int) -> None:
        self.table.move_to(0 if side < 0 else len(self.table.shown))
        self._follow()

    def action_look_into(self) -> None:
        if self.table.current is not None:
            self.post_message(self.LookInto(self))

    def _sees_cursor(self) -> bool:
        top = round(self.scroll_offset.y)
        return top <= self.table.place < top + self.size.height - HEAD

    def _follow(self) -> None:
        """Scrolls so that the cursor can be seen."""
        rows, top = max(1, self.size.height - HEAD), round(self.scroll_offset.y)
        place = self.table.place
        self.scroll_to(y=max(place - rows + 1, min(top, place)), animate=False)
        self.rearranged()

    def on_click(self, event: events.Click) -> None:
        if event.y < HEAD:
            number = self.table.column_at(event.x, self.scrollable_content_region.width)
            if number is not None:
                self.table.sort_by(number)
                self.rearranged()
            return
        row = event.y - HEAD + round(self.scroll_offset.y)
        again = row == self.table.place and event.chain == 2
        if row < len(self.table.shown):
            self.table.move_to(row)
            self.rearranged()
            if again:
                self.action_look_into()
