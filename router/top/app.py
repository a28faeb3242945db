"""`warmroute top` on a terminal: asks the router when it is time, and puts what it says into the tables."""

import asyncio
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

from rich.text import Text
from textual import on, work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.css.scalar import Scalar
from textual.events import DescendantFocus
from textual.widgets import Input

from events.tool.words import printable
from router.top import details
from router.top.answers import Decision
from router.top.asking import Asking, Away, Refused
from router.top.columns import decision_table, event_table, prefix_table, replica_table
from router.top.figures import Branch, Row, branches_of, rows_of
from router.top.heading import heading, nothing_of
from router.top.must import must_look
from router.top.room import shared_out
from router.top.screens import DetailsScreen, Heading, HelpScreen, Question
from router.top.sheet import HEAD, Sheet
from router.top.states import DRAINING
from router.top.watch import DECISIONS, PREFIXES, REPLICAS, Watch

VIEWS = ("replicas", "events", "prefixes", "decisions")
TOGETHER = {"replicas": 5, "prefixes": 3, "decisions": 4}  # and how the lines are shared out
HINT = "? help  1-4,0 tables  Enter details  / filter  <> sort  d drain  p pause  q quit"
BACK = "Esc back   up down scroll   q quit"
HEADING_LINES, HINT_LINES = 3, 1
PATHS = {"replicas": REPLICAS, "events": REPLICAS, "prefixes": PREFIXES, "decisions": DECISIONS}
OF_TABLES = ("only", "together", "leave", "filter", "sort", "turn", "unsorted")  # not where one thing is looked into
DRAINED = "It gets no new requests, and keeps what it is answering and its cache."
UNDRAINED = "It keeps its cache."


class Top(App[None]):
    CSS = """
    #heading { height: 3; }
    Sheet, VerticalScroll { scrollbar-size-vertical: 1; scrollbar-color: #555555; scrollbar-background: $background; }
    Heading { text-wrap: nowrap; text-overflow: ellipsis; }
    #tables { height: 1fr; }
    #hint { height: 1; }
    #filter { display: none; height: 1; border: none; padding: 0; }
    #filter:focus { border: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(number), f"only('{name}')", show=False) for number, name in enumerate(VIEWS, 1)),
        Binding("0", "together", show=False),
        Binding("escape", "leave", show=False),
        Binding("slash", "filter", show=False),
        Binding("less_than_sign,comma", "sort(-1)", show=False),
        Binding("greater_than_sign,full_stop", "sort(1)", show=False),
        Binding("r", "turn", show=False),
        Binding("o", "unsorted", show=False),
        Binding("d", "drain", show=False),
        Binding("p,space", "pause", show=False),
        Binding("question_mark,h", "help", show=False),
        Binding("q", "quit", show=False),
        Binding("ctrl+c", "quit", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", show=False),
    ]
    ENABLE_COMMAND_PALETTE = False
    TITLE = "warmroute top"

    def __init__(self, watch: Watch, interval_s: float) -> None:
        super().__init__()
        self.known = watch
        self.paused = False
        self.only: str | None = None  # the table that has the screen for itself
        self.sheets: dict[str, Sheet[Any]] = {
            "replicas": Sheet(replica_table(), "replicas"),
            "events": Sheet(event_table(), "events"),
            "prefixes": Sheet(prefix_table(), "prefixes"),
            "decisions": Sheet(decision_table(), "decisions"),
        }
        self._interval_s = interval_s
        self._focused = "replicas"
        self._inside: DetailsScreen | None = None  # what is looked into
        self._heading = Heading(id="heading")
        self._hint = Heading(id="hint")
        self._filtering = Input(
            id="filter", placeholder="only rows with this text; Enter keeps it, Esc does not", compact=True
        )
        self._again = asyncio.Event()  # look at once

    def compose(self) -> ComposeResult:
        yield self._heading
        with Vertical(id="tables"):
            yield from self.sheets.values()
        yield self._hint
        yield self._filtering

    def on_mount(self) -> None:
        self.sheets["replicas"].focus()
        self.draw()
        self.app_resume_signal.subscribe(self, self._resumed)
        self.set_interval(min(1.0, self._interval_s), self._head)  # ages go on while nobody answers
        self.look_again_and_again()

    @work
    async def look_again_and_again(self) -> None:
        while True:
            if not self.paused:
                await self.known.look()
                self.draw()
            self._again.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._again.wait()

    # ---- drawing

    def _resumed(self, _: App[None]) -> None:
        """After Ctrl-Z and `fg` nothing is left on the terminal of what was drawn."""
        self.screen.refresh(layout=True)

    def draw(self) -> None:
        """What is known now, where it can be seen."""
        names = [self.only] if self.only is not None else list(TOGETHER)
        items = {name: self._items(name) for name in names}
        self._arrange({name: HEAD + len(found) for name, found in items.items()})
        for name, found in items.items():
            if self.sheets[name].display:
                self._fill(name, found)
        self._head()
        if self._inside is not None:
            self._inside.draw()

    def _items(self, name: str) -> Sequence[Any]:
        match name:
            case "prefixes":
                return branches_of(self.known)
            case "decisions":
                return self.known.decisions
        return rows_of(self.known)

    def _arrange(self, wishes: dict[str, int]) -> None:
        """Each table as high as it deserves; what has no room is not there."""
        lines = self.size.height - HEADING_LINES - HINT_LINES - self._filtering.display
        given = shared_out(lines, list(wishes.values()), [TOGETHER.get(name, 1) for name in wishes])
        heights = dict(zip(wishes, given, strict=True))
        for name, sheet in self.sheets.items():
            height = heights.get(name, 0)
            sheet.display = height > 0
            if height and sheet.styles.height != Scalar.from_number(height):
                sheet.styles.height = height

    def _fill(self, name: str, items: Sequence[Any]) -> None:
        known, path, sheet = self.known, PATHS[name], self.sheets[name]
        nothing = nothing_of(known, path)
        if items and sheet.table.filter:
            nothing = f"No row has the text {sheet.table.filter!r}; Esc shows all."
        sheet.show(items, nothing, is_old=known.is_old or path in known.refused)

    def _head(self) -> None:
        lines = heading(self.known, paused=self.paused)
        text = Text("\n", no_wrap=True, overflow="ellipsis").join(lines)
        self._heading.show(text)
        if self._inside is not None:
            self._inside.heading.show(text)
        table = self.current.table
        hint = Text(no_wrap=True, overflow="ellipsis")
        if table.filter:
            hint.append(f"{len(table.shown):,} of {len(table.all):,} with {table.filter!r}  ", "bold")
        hint.append(HINT, "dim")
        self._hint.show(hint)

    def on_resize(self) -> None:
        self.call_after_refresh(self.draw)

    # ---- which table

    @property
    def current(self) -> Sheet[Any]:
        """The table that keys are meant for."""
        return self.sheets[self.only or self._focused]

    def on_descendant_focus(self, event: DescendantFocus) -> None:
        if isinstance(event.widget, Sheet) and event.widget.id is not None:
            self._focused = event.widget.id
            self._head()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        del parameters
        return action not in OF_TABLES or len(self.screen_stack) == 1

    def action_only(self, name: str) -> None:
        self.only = name
        self.draw()
        self.screen.set_focus(self.sheets[name])  # at once: the next key may have come already

    def action_together(self) -> None:
        self.only = None
        self.draw()
        self.screen.set_focus(self.sheets[self._focused if self._focused in TOGETHER else "replicas"])

    def action_leave(self) -> None:
        table = self.current.table
        if self._filtering.display or table.filter:
            self._filtering.display = False
            table.use("")
            self.screen.set_focus(self.current)
            self.draw()
        elif self.only is not None:
            self.action_together()

    # ---- rows

    def action_filter(self) -> None:
        self._filtering.value = self.current.table.filter
        self._filtering.display = True
        self.screen.set_focus(self._filtering)
        self.draw()

    @on(Input.Changed)
    def filter_changed(self, event: Input.Changed) -> None:
        if self._filtering.display:
            self.current.table.use(event.value)
            self.draw()

    @on(Input.Submitted)
    def filter_kept(self) -> None:
        self._filtering.display = False
        self.screen.set_focus(self.current)
        self.draw()

    def action_sort(self, step: int) -> None:
        sheet = self.current
        sheet.table.sort_beside(step, sheet.scrollable_content_region.width)
        sheet.rearranged()

    def action_turn(self) -> None:
        self.current.table.turn()
        self.current.rearranged()

    def action_unsorted(self) -> None:
        self.current.table.sort_by(None)
        self.current.rearranged()

    # ---- one thing

    @on(Sheet.LookInto)
    def look_into(self, event: Sheet.LookInto) -> None:
        match event.sheet.table.current:
            case Row(replica=replica):
                name = replica.name
                self._details(partial(self._replica_lines, name), f"{BACK}  d drain", name)
            case Branch() as branch:
                self._details(partial(details.of_prefix, branch), BACK)
            case Decision() as decision:
                self._details(partial(details.of_decision, decision), BACK)

    def _details(self, lines: Callable[[int], list[Text] | None], hint: str, replica: str | None = None) -> None:
        self._inside = DetailsScreen(lines, hint, drain=replica)
        self.push_screen(self._inside, self._outside_again)
        self._head()

    def _outside_again(self, _: None) -> None:
        self._inside = None

    def _replica_lines(self, name: str, width: int) -> list[Text] | None:
        del width
        row = next((row for row in rows_of(self.known) if row.replica.name == name), None)
        return None if row is None else details.of_replica(row, self.known.decisions)

    # ---- what it does

    def action_pause(self) -> None:
        self.paused = not self.paused
        self._again.set()
        self._head()

    def action_help(self) -> None:
        self.push_screen(HelpScreen())

    @work
    async def action_drain(self, name: str | None = None) -> None:
        if name is None and isinstance(row := self.current.table.current, Row):
            name = row.replica.name
        replica = next((one for one in self.known.replicas if one.name == name), None)
        if replica is None:
            self.notify("Choose a replica first: table 1 or 2.")
            return
        undo = replica.why == DRAINING[0]
        question = f"Let {replica.name} have requests again?" if undo else f"Drain {replica.name}?"
        if await self.push_screen_wait(Question(printable(question), UNDRAINED if undo else DRAINED)):
            await self._drain(replica.name, undo=undo)

    async def _drain(self, name: str, *, undo: bool) -> None:
        try:
            await self.known.asking.drain(name, undo=undo)
        except (Away, Refused) as error:
            self.notify(printable(str(error)), severity="error", timeout=10, markup=False)
            return
        self.notify(f"{printable(name)} gets {'requests again' if undo else 'no new requests'}", markup=False)
        self.known.hurry()
        self._again.set()


# ---- the shell


async def top(router_url: str, admin_key: str | None, interval_s: float) -> None:
    """ClickException where the first question is not answered: a wrong address should be said, and not watched."""
    async with Asking(router_url, admin_key) as asking:
        watch = Watch(asking, interval_s)
        await must_look(watch)
        app = Top(watch, interval_s)
        loop = asyncio.get_running_loop()
        for sign in (signal.SIGTERM, signal.SIGHUP):  # the terminal is left as it was found
            loop.add_signal_handler(sign, app.exit)
        await app.run_async()
