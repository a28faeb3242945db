"""What lies over the tables: the details of one thing, a question before something is changed, the keys."""

from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import Static

HELP = """\
 1  replicas          0       all of them together
 2  event streams     Tab     the next table
 3  hot prefixes      Enter   look into the row
 4  decisions         Esc     back; no filter any more

 up down, j k, page up and down, home end: move
 /        show only rows with a text; Enter keeps it
 < >      sort by the column to the left or right
 r        the other way round     o  as they came
 d        drain the replica, or let it serve again
 p        pause: ask the router nothing
 q        quit                    ?  this help

 hits, req/s, prefill/s  the last 15 seconds; hits: what part of
          the prompt tokens was predicted to be cached
 can/s    prefill speed, as the replica measures it
 red      a counter that rose in the last minute; a heartbeat that
          is late; fewer cached tokens than were predicted
"""


class Heading(Static):
    """Lines that are drawn again only when they say something else."""

    def __init__(self, id: str) -> None:  # as Textual names it
        super().__init__(id=id)
        self._shown = Text()

    def show(self, text: Text) -> None:
        if text != self._shown or text.spans != self._shown.spans:
            self._shown = text
            self.update(text)


class DetailsScreen(Screen[None]):
    """Drawn anew after each look; `lines` gets the width, and answers None for what is there no longer."""

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
        self.replica = drain  # the one that `d` is about
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
        text = Text("\n").join(found) if found is not None else Text("It is there no longer.", "dim")
        self._details.show(text)

    def action_scroll(self, way: str) -> None:
        scroll = self.query_one(VerticalScroll)
        (scroll.scroll_up if way == "up" else scroll.scroll_down)(animate=False)

    async def action_drain(self) -> None:
        if self.replica is not None:
            await self.app.run_action(f"drain({self.replica!r})")


class Overlay(ModalScreen[bool]):
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+c", "app.quit", show=False)]
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
        self.query_one(VerticalScroll).focus()  # so that it can be scrolled where it has no room


class HelpScreen(Overlay):
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,enter,question_mark,q", "dismiss(False)", show=False)]

    def __init__(self) -> None:
        super().__init__(Text(HELP.rstrip()))


class Question(Overlay):
    """`y` is yes; everything else that could be meant is no."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y,Y", "dismiss(True)", show=False),
        Binding("n,N,escape,enter,q", "dismiss(False)", show=False),
    ]

    def __init__(self, question: str, consequence: str) -> None:
        answers = Text.assemble(("y", "bold"), " yes   ", ("n", "bold"), " no")
        super().__init__(Text("\n").join([Text(question, "bold"), Text(consequence), Text(), answers]))
