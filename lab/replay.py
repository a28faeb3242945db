"""A router in virtual time: a clock with its agenda, and the shipped placement with a row for each replica.

`lab.simulation.router` fills it from simulated replicas, `lab.shadow.twin` from the requests that it saw.
Pure: time is an argument.
"""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Any

from router.config import RouterConfig
from router.placement.cost import Candidate, Question
from router.placement.decision import Decision
from router.placement.load import Placed
from router.placement.placement import Placement
from router.placement.policy import Ring

CONFIG = RouterConfig()


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


class ReplicaReplay:
    def __init__(self, placement: Placement, name: str, **known: int) -> None:
        """`known`: of its limit and its cache, as in `Placement.add`."""
        self.placement = placement
        self.load = placement.add(name, **known)
        self.candidate = self.load.candidate


class ReplayState:
    def __init__(self, policy: str = CONFIG.policy, **options: Any) -> None:
        """`options`: of the placement, beside those that a router takes from its configuration."""
        self.placement = Placement(policy, first_token_timeout_s=CONFIG.first_token_timeout_s, **options)
        self.placed: dict[int, Placed] = {}  # requests at replicas, by the caller's number
        self._rings: dict[tuple[str, ...], Ring] = {}

    def decide(self, question: Question, candidates: Sequence[Candidate]) -> Decision:
        ring = None
        if self.placement.policy == "session":
            names = tuple(one.name for one in candidates)
            ring = self._rings.get(names) or self._rings.setdefault(names, Ring(names))
        return self.placement.decide(question, candidates, ring)

    def begun(self, number: int, now_s: float) -> None:
        if (placed := self.placed.get(number)) is not None:
            self.placement.begun(placed, now_s)

    def ended(self, number: int, now_s: float) -> None:
        if (placed := self.placed.pop(number, None)) is not None:
            self.placement.ended(placed, now_s)
