"""Events in virtual time, which goes from one event to the next."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count


class Agenda:
    """A queue of events by time; those of the same time happen in order of entry."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, time_s: float, happens: Callable[[], None]) -> None:
        heappush(self._events, (max(time_s, self.now_s), next(self._numbers), happens))

    def after(self, delay_s: float, happens: Callable[[], None]) -> None:
        self.at(self.now_s + delay_s, happens)

    def step(self) -> bool:
        """Let the next event happen; return False if there is none."""
        if not self._events:
            return False
        self.now_s, _, happens = heappop(self._events)
        happens()
        return True
