"""Looks at a router again and again, and keeps what it said last; who draws it asks for a look when it is time."""

import time
from collections.abc import Awaitable, Callable

from router.prefixes.shared import Shared
from router.top.answers import Decision, Decisions, Replica, Replicas, Totals, totals_of
from router.top.asking import Asking, Away, Refused
from router.top.history import History
from router.top.pace import Pace

REPLICAS, METRICS, PREFIXES, DECISIONS = "/replicas", "/metrics", "/prefixes", "/decisions"
PREFIXES_EVERY_S = 3.0  # a tree is made for each answer, and it changes slowly
MOST_PREFIXES = 200
MOST_CONSIDERED = 20_000  # in one answer: each decision names every replica of its model
HANGS_S = 3.0  # an answer that takes so long says something by itself
FEWEST_DECISIONS, MOST_DECISIONS = 20, 200


class Watch:
    """What is known of a router. What could be known once stays known while it is away."""

    def __init__(self, asking: Asking, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.asking = asking
        self.replicas: list[Replica] = []
        self.shared: Shared | None = None
        self.decisions: list[Decision] = []
        self.totals: Totals | None = None
        self.refused: dict[str, str] = {}  # by path, why
        self.away: str | None = None  # why nobody answered
        self.seen_s: float | None = None  # when the replicas were told last
        self.history = History()
        self._clock = clock
        self._asked_s: float | None = None  # what is not answered yet
        self._questions: dict[str, tuple[Pace, Callable[[], Awaitable[None]]]] = {
            REPLICAS: (Pace(interval_s), self._ask_replicas),
            DECISIONS: (Pace(interval_s), self._ask_decisions),
            PREFIXES: (Pace(max(interval_s, PREFIXES_EVERY_S)), self._ask_prefixes),
            METRICS: (Pace(interval_s), self._ask_metrics),
        }

    @property
    def absence(self) -> str | None:
        """Why nobody answers now."""
        if self.away is None and self._asked_s is not None and self._clock() - self._asked_s > HANGS_S:
            return "it takes connections, and does not answer"
        return self.away

    @property
    def is_old(self) -> bool:
        """Whether what is known is not of now."""
        return self.absence is not None or REPLICAS in self.refused

    def age_s(self) -> float | None:
        """Of what is known of the replicas; None: nothing is."""
        return None if self.seen_s is None else self._clock() - self.seen_s

    def hurry(self) -> None:
        """Something was changed: what the router says of it is wanted at once."""
        self._questions[REPLICAS][0].hurry()

    async def look(self) -> None:
        """Asks for what is due; raises nothing: `away` and `refused` say what went wrong."""
        try:
            for path in self._questions:
                if not await self._ask(path) and path == REPLICAS:
                    break  # it would say the same of the others
            self.away = None
        except Away as error:
            self.away = str(error)

    async def _ask(self, path: str) -> bool:
        """False: it is refused. Away."""
        pace, ask = self._questions[path]
        began_s = self._clock()
        if not pace.is_due(began_s):
            return path not in self.refused
        self._asked_s = began_s
        try:
            await ask()
        except Refused as error:
            self.refused[path] = str(error)
            pace.refused(began_s)
            return False
        finally:
            self._asked_s = None
        pace.asked(began_s, self._clock() - began_s, self.asking.way_s)
        self.refused.pop(path, None)
        return True

    async def _ask_replicas(self) -> None:
        self.replicas = (await self.asking.get(REPLICAS, Replicas)).replicas
        self.seen_s = self._clock()
        self.history.add(self.replicas, self.seen_s)

    async def _ask_decisions(self) -> None:
        limit = min(MOST_DECISIONS, max(FEWEST_DECISIONS, MOST_CONSIDERED // max(1, len(self.replicas))))
        self.decisions = (await self.asking.get(f"{DECISIONS}?limit={limit}", Decisions)).decisions

    async def _ask_prefixes(self) -> None:
        self.shared = await self.asking.get(f"{PREFIXES}?limit={MOST_PREFIXES}", Shared)

    async def _ask_metrics(self) -> None:
        try:
            self.totals = totals_of(await self.asking.text(METRICS))
        except ValueError as error:
            raise Away(f"what answers is no router: {METRICS}: {error}") from error
        if self.totals is None:
            raise Away(f"what answers is no router: its {METRICS} has no warmroute_router:open_requests")
        self.history.add_totals(self.totals, self._clock())
