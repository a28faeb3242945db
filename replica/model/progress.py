"""Progress of long work: a bar where stderr is a terminal, otherwise a line in the log now and then."""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

log = logging.getLogger(__name__)

LINE_EVERY_S = 10.0

Spoken: TypeAlias = Callable[[int], str]


def spoken_size(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.1f} MB"


def progress_of(what: str, total: int, console: Console | None = None, *, spoken: Spoken = spoken_size) -> "Progress":
    """Show the progress of `what` ("loading llama"), in bytes unless another format is given."""
    console = console or Console(stderr=True)
    return Bar(what, total, console, spoken) if console.is_terminal else Lines(what, total, spoken=spoken)


class Progress(ABC):
    """As a context it finishes when all is done, and stops where something fails."""

    @abstractmethod
    def advance(self, done: int) -> None: ...

    @abstractmethod
    def finish(self) -> None:
        """All is done."""

    def stop(self) -> None:  # noqa: B027
        """It ends before it is done: nothing more is shown."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.finish() if kind is None else self.stop()


class Lines(Progress):
    """A line at the start, at the end, and in between not more often than every 10 seconds."""

    def __init__(
        self, what: str, total: int, clock_s: Callable[[], float] = time.monotonic, spoken: Spoken = spoken_size
    ) -> None:
        self._what = what
        self._total = total
        self._done = 0
        self._clock_s = clock_s
        self._spoken = spoken
        self._started_s = self._said_s = clock_s()
        log.info("%s: %s", what, self._spoken(total))

    def advance(self, done: int) -> None:
        self._done += done
        now_s = self._clock_s()
        if now_s - self._said_s >= LINE_EVERY_S:
            self._said_s = now_s
            elapsed_s = now_s - self._started_s
            so_far, total = self._spoken(self._done), self._spoken(self._total)
            log.info("%s: %s of %s after %.0f s", self._what, so_far, total, elapsed_s)

    def finish(self) -> None:
        log.info("%s: done in %.1f s", self._what, self._clock_s() - self._started_s)


class Bar(Progress):
    """One line of the terminal, which stays there when it is full."""

    def __init__(self, what: str, total: int, console: Console, spoken: Spoken) -> None:
        amount = DownloadColumn() if spoken is spoken_size else MofNCompleteColumn()
        self._bars = Bars(TextColumn("{task.description}"), BarColumn(), amount, TimeElapsedColumn(), console=console)
        self._task = self._bars.add_task(what, total=total)
        self._total = total
        self._bars.start()

    def advance(self, done: int) -> None:
        self._bars.advance(self._task, done)

    def finish(self) -> None:
        self._bars.update(self._task, completed=self._total)
        self.stop()

    def stop(self) -> None:
        self._bars.stop()
