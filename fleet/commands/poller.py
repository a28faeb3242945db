"""Polls a fleet, also while its controller restarts, perhaps elsewhere."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

import click

from fleet.commands.client import Fleet
from fleet.commands.local_fleets import Where
from fleet.commands.view import View
from router.asking import Unreachable

T = TypeVar("T")


class Poller:
    """A fleet that is polled; to be closed, or used as a context manager."""

    def __init__(self, locate: Callable[[], Where]) -> None:
        self.why = ""  # why there is no answer
        self.answer = b""  # the last one, as it came
        self._locate = locate
        self._away_since_s: float | None = None
        where = locate()
        self.fleet = Fleet(where.url, where.key)

    @property
    def away_s(self) -> float:
        """Seconds since the controller answered last."""
        return 0.0 if self._away_since_s is None else time.monotonic() - self._away_since_s

    def look(self) -> View | None:
        """Return the answer; None while the controller does not answer."""
        answer = self.ask(Fleet.answer)
        if answer is None:
            return None
        self.answer = answer
        return self.fleet.read(answer)

    def ask(self, question: Callable[[Fleet], T]) -> T | None:
        """Return the answer; None while the controller does not answer."""
        try:
            answer = question(self.fleet)
        except Unreachable as error:
            self.why = error.reason
            if self._away_since_s is None:
                self._away_since_s = time.monotonic()
            self._find_again()
            return None
        self._away_since_s = None
        return answer

    def _find_again(self) -> None:
        try:
            where = self._locate()
        except click.ClickException:  # none is there now
            return
        if where.url != self.fleet.url:
            self.fleet.close()
            self.fleet = Fleet(where.url, where.key)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.fleet.close()
