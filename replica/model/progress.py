"""How far something long has come: a bar where stderr is a terminal, otherwise a line in the log now and then."""

import logging
import time
from collections.abc import Callable
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

log = logging.getLogger(__name__)

LINE_EVERY_S = 10.0


class Progress(Protocol):
    def advance(self, size_bytes: int) -> None: ...
    def finish(self) -> None:
        """All is done; says how long it took."""

    def stop(self) -> None:
        """It ends before it is done: nothing more is shown."""


def progress_of(what: str, total_bytes: int, console: Console | None = None) -> Progress:
    """Shows `what` ("loading llama") from now on."""
    console = console or Console(stderr=True)
    return Bar(what, total_bytes, console) if console.is_terminal else Lines(what, total_bytes)


class Lines:
    """A line at the start, at the end, and in between not more often than every 10 seconds."""

    def __init__(self, what: str, total_bytes: int, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._clock_s = clock_s
        self._started_s = self._said_s = clock_s()
        log.info("%s: %s", what, spoken_size(total_bytes))

    def advance(self, size_bytes: int) -> None:
        self._done_bytes += size_bytes
        now_s = self._clock_s()
        if now_s - self._said_s >= LINE_EVERY_S:
            self._said_s = now_s
            elapsed_s = now_s - self._started_s
            done, total = spoken_size(self._done_bytes), spoken_size(self._total_bytes)
            log.info("%s: %s of %s after %.0f s", self._what, done, total, elapsed_s)

    def finish(self) -> None:
        log.info("%s: done in %.1f s", self._what, self._clock_s() - self._started_s)

    def stop(self) -> None:
        pass


class Bar:
    """One line of the terminal, which stays there when it is full."""

    def __init__(self, what: str, total_bytes: int, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
        self._bars = Bars(*columns, console=console)
        self._task = self._bars.add_task(what, total=total_bytes)
        self._total_bytes = total_bytes
        self._bars.start()

    def advance(self, size_bytes: int) -> None:
        self._bars.advance(self._task, size_bytes)

    def finish(self) -> None:
        self._bars.update(self._task, completed=self._total_bytes)
        self.stop()

    def stop(self) -> None:
        self._bars.stop()


def spoken_size(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.1f} MB"
