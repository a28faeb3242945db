"""Progress of a long task: a bar below the messages on a terminal, elsewhere the messages alone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text


class Display:
    """To be used as a context manager. `quiet`: only a bar says how far it is; else lines do where there is none."""

    def __init__(self, title: str, console: Console | None = None, *, quiet: bool = False) -> None:
        self._console = console or Console(highlight=False, emoji=False, markup=False)
        self._title = title
        self._quiet = quiet
        self._said = ""
        self.bar: Progress | None = None
        if has_cursor(self._console):
            columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=24))
            self.bar = Progress(
                *columns,
                TextColumn("{task.fields[said]}", markup=False),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
                refresh_per_second=4,  # drawing takes time that others need
            )
            self._task = self.bar.add_task(title, total=None, said="")

    def line(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def begin(self, title: str, total: int | None) -> None:
        if self.bar is not None:
            self.bar.reset(self._task, total=total, description=title, said="")

    def step(self, done: int, of: int | None, said: str | None = None) -> None:
        said = f"{done:,} of {of:,}" if of and said is None else said or f"{done:,}"
        if self.bar is not None:
            self.bar.update(self._task, completed=done, total=of or None, said=said)
        elif said != self._said and not self._quiet:
            self.line(f"{self._title}: {said}")
        self._said = said

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()

    def __enter__(self) -> Self:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def has_cursor(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Yield a function for progress updates; it draws on standard error if that is a terminal."""
    with Display(what, Console(stderr=True), quiet=True) as display:
        yield lambda done: display.step(done, total)
