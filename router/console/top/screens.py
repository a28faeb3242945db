"""Screens over the tables: details of one row, a confirmation, the list of keys."""

from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import Static

HELP = """\
 1  replicas          0       overview of three tables
 2  event streams     Tab     next table
 3  hot prefixes      Enter   details of the row
 4  decisions         Esc     back, or remove the filter

 up down, j k, page up and down, home end: move
 /        show only rows with a text; Enter keeps it
 < >      sort by the next column to the left or right
 r        reverse the order       o  original order
 d        drain the replica, or let it serve again
 q        quit                    ?  this help

 hits, req/s, prefill/s  over the last 15 seconds; hits: share of
          prompt tokens predicted to be cached
 can/s    prefill speed measured by the replica
 red      a counter that rose in these seconds; a late heartbeat;
          fewer cached tokens than predicted
"""


class Heading(Static):
    """Text that is redrawn only when it changes."""

    def __init__(self, id: str) -> None:  # as Textual names it
        super().__init__(id=id)
        self._shown = Text()

    def show(self, text: Text) -> None:
        if text != self._shown or text.spans != self._shown.spans:
            self._shown = text
            self.update(text)


class DetailsScreen(Screen[None]):
    """Details, redrawn after each poll. `lines` takes the width and returns None once the row is gone."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,enter,backspace", "dismiss", show=False),
        Binding("d", "drain", show=False),
        Binding("up,k", "scroll('up')", show=False),
        Binding("down,j", "scroll('down')", show=False),
    ]
    DEFAULT_CSS = """
    DetailsScreen > #heading { height: 3; }
    DetailsScreen > VerticalScroll { height: 1fr; padding: 1 1 0 1; }
    DetailsScreen > #hint { height: 1; }
    """

    def __init__(self, lines: Callable[[int], list[Text] | None], hint: str, *, drain: str | None = None) -> None:
        super().__init__()
        self.replica = drain  # the replica that `d` drains
        self.heading = Heading(id="heading")
        self._details = Heading(id="details")
        self._lines = lines
        self._hint = hint

    def compose(self) -> ComposeResult:
        yield self.heading
        with VerticalScroll():
            yield self._details
        yield Static(Text(self._hint, "dim", no_wrap=True, overflow="ellipsis"), id="hint")

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()
        self.draw()

    def on_resize(self) -> None:
        self.draw()

    def draw(self) -> None:
        found = self._lines(max(20, self.size.width - 3))
        text = Text("\n").join(found) if found is not None else Text("It is gone.", "dim")
        self._details.show(text)

    def action_scroll(self, way: str) -> None:
        scroll = self.query_one(VerticalScroll)
        (scroll.scroll_up if way == "up" else scroll.scroll_down)(animate=False)

    async def action_drain(self) -> None:
        if self.replica is not None:
            await self.app.run_action(f"drain({self.replica!r})")


class Overlay(ModalScreen[bool]):
    """Text over the tables. If it asks something, `y` is yes and the other usual answers are no."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c", "app.quit", show=False),
        Binding("y,Y", "dismiss(True)", show=False),
        Binding("n,N,escape,enter,question_mark,q", "dismiss(False)", show=False),
    ]
    DEFAULT_CSS = """
    Overlay { align: center middle; }
    Overlay > VerticalScroll { width: auto; max-width: 100%; height: auto; max-height: 100%; border: round $accent;
        padding: 0 1; background: $surface; }
    Overlay Static { width: auto; max-width: 100%; }
    """

    def __init__(self, text: Text) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(self._text)

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()  # for scrolling in a small terminal


def confirmation(question: str, consequence: str) -> Overlay:
    answers = Text.assemble(("y", "bold"), " yes   ", ("n", "bold"), " no")
    return Overlay(Text("\n").join([Text(question, "bold"), Text(consequence), Text(), answers]))
