"""Progress of long work: a line in the log now and then."""

import logging
import time
from collections.abc import Callable
from typing import Self

log = logging.getLogger(__name__)

LINE_EVERY_S = 10.0


def spoken_size(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.1f} MB"


class Progress:
    """A line at the start, at the end if all is done, and in between not more often than every 10 seconds.

    `what` is "loading llama", and the numbers are bytes unless another format is given.
    """

    def __init__(
        self,
        what: str,
        total: int,
        *,
        spoken: Callable[[int], str] = spoken_size,
        clock_s: Callable[[], float] = time.monotonic,
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
