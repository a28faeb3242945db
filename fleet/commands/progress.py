"""Shows how a change comes about: a bar below the news on a terminal, the news alone elsewhere."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, Self

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from fleet.commands.client import CONTROLLER
from fleet.commands.lookout import Lookout
from fleet.commands.view import View
from fleet.commands.words import changes
from router.asking import Unreachable

LOOK_S = 0.25
MISSING_S = 60.0  # a controller that was restarted has answered by then


class Step(NamedTuple):
    done: int
    of: int
    is_over: bool


class Display:
    """To be used as a context manager."""

    def __init__(self, title: str, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, emoji=False, markup=False)
        self._title = title
        self._said = ""
        self._bar: Progress | None = None
        if has_cursor(self._console):
            columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[said]}"))
            self._bar = Progress(*columns, TimeElapsedColumn(), console=self._console, transient=True)
            self._task = self._bar.add_task(title, total=None, said="")

    def line(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def step(self, done: int, of: int) -> None:
        said = f"{done} of {of}"
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=of or None, said=said)
        elif said != self._said:
            self.line(f"{self._title}: {said}")
        self._said = said

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def has_cursor(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal


def follow(lookout: Lookout, before: View, model: str, title: str, step: Callable[[View], Step]) -> None:
    """Show what happens to a model until `step` says that it is over; Ctrl-C ends the waiting, not the change."""
    try:
        with Display(title) as display:
            _follow(lookout, before, model, display, step)
    except KeyboardInterrupt:
        click.echo("No longer waited for; the change stays in effect. See `warmroute status`.", err=True)
        raise


def _follow(lookout: Lookout, seen: View, model: str, display: Display, step: Callable[[View], Step]) -> None:
    said = False
    while True:
        view = lookout.look()
        if view is None:
            if lookout.away_s > MISSING_S:
                raise Unreachable(CONTROLLER, lookout.fleet.url, lookout.why)
            if not said:
                display.line(f"The controller does not answer ({lookout.why}); it is asked again")
            said = True
        else:
            said = False
            for line in changes(seen, view, model):
                display.line(line)
            if view.ending:
                raise click.ClickException("the fleet is ending")
            done, of, is_over = step(view)
            display.step(done, of)
            if is_over:
                return
            seen = view
        time.sleep(LOOK_S)
