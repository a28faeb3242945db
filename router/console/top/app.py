"""The live view of `warmroute top`: polls the router and fills the tables."""

import asyncio
import signal
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, ClassVar

import click
from rich.text import Text
from textual import on, work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.css.scalar import Scalar
from textual.events import DescendantFocus
from textual.widgets import Input

from events.tool.words import printable
from router.console.top import details, tables
from router.console.top.heading import empty_text, heading
from router.console.top.poller import DECISIONS, PREFIXES, REPLICAS, Poller, RouterClient
from router.console.top.screens import HELP, DetailsScreen, Heading, Overlay, confirmation
from router.console.top.table_view import HEAD, TableView
from router.console.top.tables import DRAINING, Branch, Row, branches_of, rows_of
from router.responses import DecisionRecord

VIEWS: dict[str, tuple[Callable[[], Any], str]] = {  # their tables, and the paths where these come from
    "replicas": (tables.replica_table, REPLICAS),
    "events": (tables.event_table, REPLICAS),
    "prefixes": (tables.prefix_table, PREFIXES),
    "decisions": (tables.decision_table, DECISIONS),
}
OVERVIEW = ("replicas", "prefixes", "decisions")  # shown together
LEAST_LINES = 3  # of a table: titles and two rows
HINT = "? help  1-4,0 tables  Enter details  / filter  <> sort  d drain  q quit"
FILTERS = "show rows with this text; Enter keeps it, Esc drops it"
BACK = "Esc back   up down scroll   q quit"
HEADING_LINES, HINT_LINES = 3, 1
TABLE_ACTIONS = ("only", "overview", "leave", "filter", "sort", "reverse", "unsorted")  # not on the details screen
DRAINED = "It gets no new requests. It finishes its running requests and keeps its cache."
UNDRAINED = "It keeps its cache."


class Top(App[None]):
    CSS = """
    #heading { height: 3; }
    TableView, VerticalScroll {
        scrollbar-size-vertical: 1; scrollbar-color: #555555; scrollbar-background: $background;
    }
    Heading { text-wrap: nowrap; text-overflow: ellipsis; }
    #tables { height: 1fr; }
    TableView { min-height: 3; }
    #replicas { height: 5fr; }
    #prefixes { height: 3fr; }
    #decisions { height: 4fr; }
    #hint { height: 1; }
    #filter { display: none; height: 1; border: none; padding: 0; }
    #filter:focus { border: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(number), f"only('{name}')", show=False) for number, name in enumerate(VIEWS, 1)),
        Binding("0", "overview", show=False),
        Binding("escape", "leave", show=False),
        Binding("slash", "filter", show=False),
        Binding("less_than_sign,comma", "sort(-1)", show=False),
        Binding("greater_than_sign,full_stop", "sort(1)", show=False),
        Binding("r", "reverse", show=False),
        Binding("o", "unsorted", show=False),
        Binding("d", "drain", show=False),
        Binding("question_mark,h", "help", show=False),
        Binding("q", "quit", show=False),
        Binding("ctrl+c", "quit", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", show=False),
    ]
    ENABLE_COMMAND_PALETTE = False
    TITLE = "warmroute top"

    def __init__(self, poller: Poller, interval_s: float) -> None:
        super().__init__()
        self.poller = poller
        self.only: str | None = None  # the table that fills the screen
        self.views = {name: TableView[Any](table(), name) for name, (table, _) in VIEWS.items()}
        self._interval_s = interval_s
        self._focused = "replicas"
        self._heading, self._hint = Heading(id="heading"), Heading(id="hint")
        self._filter = Input(id="filter", compact=True, placeholder=FILTERS)
        self._poll_now = asyncio.Event()

    def compose(self) -> ComposeResult:
        yield self._heading
        with Vertical(id="tables"):
            yield from self.views.values()
        yield self._hint
        yield self._filter

    def on_mount(self) -> None:
        self.views["replicas"].focus()
        self.draw()
        # After Ctrl-Z and `fg` the terminal is empty.
        self.app_resume_signal.subscribe(self, lambda _: self.screen.refresh(layout=True))
        self.set_interval(min(1.0, self._interval_s), self._draw_heading)  # ages grow while nothing answers
        self.poll_forever()

    @work
    async def poll_forever(self) -> None:
        while True:
            await self.poller.poll()
            self.draw()
            self._poll_now.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._poll_now.wait()

    # ---- drawing

    def draw(self) -> None:
        """Fill and lay out the visible tables."""
        items = {name: self._items(name) for name in (OVERVIEW if self.only is None else (self.only,))}
        self._arrange({name: HEAD + len(found) for name, found in items.items()})
        poller = self.poller
        for name, found in items.items():
            path, view = VIEWS[name][1], self.views[name]
            if view.display:
                is_filtered = found and view.table.filter
                hint = f"No row has the text {view.table.filter!r}; Esc shows all." if is_filtered else ""
                is_stale = poller.is_stale or path in poller.refused
                view.show(found, hint or empty_text(poller, path), is_stale=is_stale)
        self._draw_heading()
        for screen in self._open_details():
            screen.draw()

    def _items(self, name: str) -> Sequence[Any]:
        match name:
            case "prefixes":
                return branches_of(self.poller)
            case "decisions":
                return self.poller.decisions
        return rows_of(self.poller)

    def _arrange(self, lines_of: dict[str, int]) -> None:
        """Limit each table to its lines; the last one fills the rest. Hide the last ones where there is no room."""
        lines = self.size.height - HEADING_LINES - HINT_LINES - self._filter.display
        fitting = list(lines_of)[: max(1, lines // LEAST_LINES)]
        for name, view in self.views.items():
            view.display = name in fitting
            highest = Scalar.from_number(max(LEAST_LINES, lines_of[name])) if name in fitting[:-1] else None
            if view.styles.max_height != highest:
                view.styles.max_height = highest

    def _draw_heading(self) -> None:
        text = Text("\n", no_wrap=True, overflow="ellipsis").join(heading(self.poller))
        self._heading.show(text)
        for screen in self._open_details():
            screen.heading.show(text)
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
    def current(self) -> TableView[Any]:
        """The table that keys act on."""
        return self.views[self.only or self._focused]

    def on_descendant_focus(self, event: DescendantFocus) -> None:
        if isinstance(event.widget, TableView) and event.widget.id is not None:
            self._focused = event.widget.id
            self._draw_heading()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        del parameters
        return action not in TABLE_ACTIONS or len(self.screen_stack) == 1

    def action_only(self, name: str) -> None:
        self.only = name
        self.draw()
        self.screen.set_focus(self.views[name])  # now: the next key may be waiting already

    def action_overview(self) -> None:
        self.only = None
        self.draw()
        self.screen.set_focus(self.views[self._focused if self._focused in OVERVIEW else "replicas"])

    def action_leave(self) -> None:
        table = self.current.table
        if self._filter.display or table.filter:
            self._filter.display = False
            table.set_filter("")
            self.screen.set_focus(self.current)
            self.draw()
        elif self.only is not None:
            self.action_overview()

    # ---- rows

    def action_filter(self) -> None:
        self._filter.value = self.current.table.filter
        self._filter.display = True
        self.screen.set_focus(self._filter)
        self.draw()

    @on(Input.Changed)
    def filter_changed(self, event: Input.Changed) -> None:
        if self._filter.display:
            self.current.table.set_filter(event.value)
            self.draw()

    @on(Input.Submitted)
    def filter_kept(self) -> None:
        self._filter.display = False
        self.screen.set_focus(self.current)
        self.draw()

    def action_sort(self, step: int) -> None:
        view = self.current
        view.table.sort_by_next(step, view.scrollable_content_region.width)
        view.redraw()

    def action_reverse(self) -> None:
        self.current.table.toggle_order()
        self.current.redraw()

    def action_unsorted(self) -> None:
        self.current.table.sort_by(None)
        self.current.redraw()

    # ---- details of one row

    @on(TableView.Selected)
    def open_details(self, event: TableView.Selected) -> None:
        match event.view.table.current:
            case Row(replica=replica):
                name = replica.name
                screen = DetailsScreen(partial(self._replica_lines, name), f"{BACK}  d drain", drain=name)
            case Branch() as branch:
                screen = DetailsScreen(partial(details.prefix_lines, branch), BACK)
            case DecisionRecord() as decision:
                screen = DetailsScreen(lambda _: details.decision_lines(decision), BACK)
            case _:
                return
        self.push_screen(screen)
        self._draw_heading()

    def _open_details(self) -> list[DetailsScreen]:
        return [screen for screen in self.screen_stack if isinstance(screen, DetailsScreen)]

    def _replica_lines(self, name: str, _: int) -> list[Text] | None:
        row = next((row for row in rows_of(self.poller) if row.replica.name == name), None)
        return None if row is None else details.replica_lines(row)

    # ---- help, drain

    def action_help(self) -> None:
        self.push_screen(Overlay(Text(HELP.rstrip())))

    @work
    async def action_drain(self, name: str | None = None) -> None:
        if name is None and isinstance(row := self.current.table.current, Row):
            name = row.replica.name
        replica = next((one for one in self.poller.replicas if one.name == name), None)
        if replica is None:
            self.notify("Choose a replica first: table 1 or 2.")
            return
        undo = replica.why == DRAINING[0]
        question = f"Let {replica.name} have requests again?" if undo else f"Drain {replica.name}?"
        if not await self.push_screen_wait(confirmation(printable(question), UNDRAINED if undo else DRAINED)):
            return
        try:
            await self.poller.client.drain(replica.name, undo=undo)
        except click.ClickException as error:
            self.notify(printable(error.message), severity="error", timeout=10, markup=False)
            return
        what = "requests again" if undo else "no new requests"
        self.notify(f"{printable(replica.name)} gets {what}", markup=False)
        self.poller.make_due()
        self._poll_now.set()


async def top(router_url: str, admin_key: str | None, interval_s: float) -> None:
    """Run the live view; raise ClickException if the first poll fails, as with a wrong address."""
    async with aclosing(RouterClient(router_url, admin_key)) as client:
        poller = Poller(client, interval_s)
        await poller.require()
        app = Top(poller, interval_s)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):  # exit cleanly, so that the terminal is restored
            loop.add_signal_handler(number, app.exit)
        await app.run_async()
