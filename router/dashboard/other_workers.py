"""The part of the dashboard's figures that the other workers of the router count."""

from router.members.counts import ReplicaCounts
from router.workers.colleagues import Colleagues
from router.workers.questions import FIGURES, Figures

_NOTHING = Figures({}, 0, 0)


class OtherWorkers:
    """Sums that do not fall when a worker ends. Without colleagues they stay at zero."""

    def __init__(self, colleagues: Colleagues | None) -> None:
        self.waiting = 0
        self.unserved = 0
        self._colleagues = colleagues
        self._counts: dict[str, ReplicaCounts] = {}
        self._in_flight: dict[str, int] = {}
        self._last: dict[int, Figures] = {}
        self._begins_late = colleagues is not None and colleagues.place.replaces  # what was before is not news

    def counts(self, replica: str) -> ReplicaCounts:
        return self._counts.get(replica, ReplicaCounts())

    def in_flight(self, replica: str) -> int:
        return self._in_flight.get(replica, 0)

    async def look(self) -> None:
        if self._colleagues is None:
            return
        found = await self._colleagues.told(FIGURES)
        for number, figures in found.items():
            if not self._begins_late or number in self._last:
                self._add(self._last.get(number, _NOTHING), figures)
        self._last = {**self._last, **found}
        self.waiting = sum(figures.waiting for figures in found.values())
        self._in_flight = {}
        for figures in found.values():
            for name, one in figures.replicas.items():
                self._in_flight[name] = self._in_flight.get(name, 0) + one.in_flight
        self._counts = {name: counts for name, counts in self._counts.items() if name in self._in_flight}

    def _add(self, before: Figures, now: Figures) -> None:
        self.unserved += now.unserved - (before.unserved if before.unserved <= now.unserved else 0)
        for name, one in now.replicas.items():
            last, counts = before.replicas.get(name), one.counts
            # Counts that fell have begun anew, at a worker or a replica that has.
            if last is not None and last.counts.requests <= counts.requests:
                counts = counts.since(last.counts)
            self._counts.setdefault(name, ReplicaCounts()).add(counts)
