"""Alerts: the rules of `warmroute doctor`, applied to two snapshots of the running router.

Rules that need a replica's own /metrics apply in small fleets only.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from router.console.samples import BadMetrics, Samples
from router.dashboard.doctor.engine_metrics import READ, engine_figures
from router.dashboard.doctor.figures import EngineFigures, Figures, ReplicaFigures
from router.dashboard.doctor.looks import Reading, RouterLook, reading, replica_figures, router_figures
from router.dashboard.doctor.rules import Finding, about, about_fleet, in_order
from router.dashboard.rows import Fleet
from router.dashboard.sampling import paused
from router.members.broken import Broken
from router.members.fetch import fetch
from router.members.members import Member, Members, Server, approximate_prompts
from router.placement.cost import INFINITE
from router.proxy.request_summary import PastDecision
from router.records.history import History
from router.responses import ReplicaStatus

EVERY_S = 5.0
LOOKS = 3  # the oldest is compared with the newest
READINGS = 12  # readings of the queues, one per frame
MAX_REPLICAS = 32  # a larger fleet's own /metrics would take too long to poll
TIMEOUT_S = 2.0
MAX_CHOICES = 500
MAX_CONSIDERED = 200_000  # candidates of all decisions together
MAX_ALERTS = 50
MAX_ENDED = 10
ENDED_FOR_S = 600.0  # an alert is shown this long after its end
CONSIDERED_AT_A_TIME = 2000
ROWS_AT_A_TIME = 500  # rows are cheap to read


class Alert(Finding, frozen=True):
    """A finding, with the Unix times at which it was found first, and no more."""

    since: float = 0.0
    until: float | None = None  # None: it is still found


class AlertReport(Struct):
    judged_at: float | None = None
    window_s: float = 0.0
    truncated: int = 0
    alerts: list[Alert] = []
    ended: list[Alert] = []  # the newest first


class Look(NamedTuple):
    at_s: float
    router: RouterLook
    replicas: dict[str, tuple[Member, ReplicaStatus]]
    newest: PastDecision | None


class ReplicaMetrics:
    """Polls the replicas' own /metrics in a small fleet. Call `forget` when the last dashboard closed."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._samples: dict[Member, deque[Samples]] = {}
        self._polling: asyncio.Task[None] | None = None

    def poll(self) -> None:
        """Start a poll in the background, unless one is running."""
        if self._polling is None or self._polling.done():
            self._polling = asyncio.create_task(self._poll_all())

    def forget(self) -> None:
        self._samples.clear()
        if self._polling is not None:
            self._polling.cancel()
            self._polling = None

    def figures(self, member: Member, index: tuple[float, float] | None) -> EngineFigures | None:
        """`index`: the member's blocks in the router's index, and their increase."""
        samples = self._samples.get(member)
        return engine_figures(samples[0], samples[-1], index) if samples else None

    async def _poll_all(self) -> None:
        members = list(self._members)
        if len(members) > MAX_REPLICAS:
            members = []
        self._samples = {member: kept for member in members if (kept := self._samples.get(member)) is not None}
        await asyncio.gather(*map(self._poll, {member.server: None for member in members}))

    async def _poll(self, server: Server) -> None:
        try:
            answer = await fetch(server.upstream, "/metrics", lines=server.key_line, timeout_s=TIMEOUT_S)
            samples = Samples(answer.body.decode(errors="replace") if answer.status == 200 else "", READ)
        except (Broken, BadMetrics):
            for member in server.members:
                self._samples.pop(member, None)
            return
        for member in server.members:
            own = samples if member.rank is None else samples.of_rank(member.rank)
            self._samples.setdefault(member, deque(maxlen=LOOKS)).append(own)


@dataclass(eq=False)
class Alerts:
    """Call `see` for each frame while a dashboard is open, and `forget` some time after the last one closed."""

    policy: str
    members: Members
    history: History

    def __post_init__(self) -> None:
        self.report = AlertReport()
        self._metrics = ReplicaMetrics(self.members)
        self._alerts: dict[tuple[str, str | None], Alert] = {}  # alerts by rule and replica
        self._ended: deque[Alert] = deque(maxlen=MAX_ENDED)
        self._looks: deque[Look] = deque(maxlen=LOOKS)
        self._readings: deque[dict[str, Reading]] = deque(maxlen=READINGS)

    def forget(self) -> None:
        self.report = AlertReport()
        self._alerts.clear()
        self._ended.clear()
        self._looks.clear()
        self._readings.clear()
        self._metrics.forget()

    async def see(self, fleet: Fleet) -> None:
        self._readings.append({one.name: reading(one) async for one in paused(fleet.replicas, by=ROWS_AT_A_TIME)})
        if self._looks and fleet.at_s - self._looks[-1].at_s < EVERY_S:
            return
        self._looks.append(self._look(fleet))
        figures = await self.figures(self._looks[0], self._looks[-1])
        findings = about_fleet(figures)
        async for replica in paused(figures.replicas):
            findings += about(replica, figures)
        now = round(time.time(), 3)
        before, self._alerts = self._alerts, {}
        for one in in_order(findings):
            key = one.rule, one.replica
            since = before[key].since if key in before else now
            self._alerts[key] = Alert(one.rule, one.replica, one.what, one.turn, one.figures, since)
        self._ended.extendleft(replace(one, until=now) for key, one in before.items() if key not in self._alerts)
        self.report = AlertReport(
            judged_at=now,
            window_s=round(figures.window_s, 1),
            truncated=max(0, len(findings) - MAX_ALERTS),
            alerts=list(islice(self._alerts.values(), MAX_ALERTS)),
            ended=[one for one in self._ended if one.until is not None and now - one.until < ENDED_FOR_S],
        )
        self._metrics.poll()

    def _look(self, fleet: Fleet) -> Look:
        by_name = self.members.by_name
        replicas = {one.name: (by_name[one.name], one) for one in fleet.replicas if one.name in by_name}
        approximate: Counter[str] = Counter()
        for (_, reason), count in approximate_prompts(self.members.models.values()).items():
            approximate[reason] += count
        requests = sum(one.served.requests for _, one in replicas.values())
        router = RouterLook(requests, self.history.counts.refused.copy(), approximate)
        return Look(fleet.at_s, router, replicas, self.history.decisions[-1] if self.history.decisions else None)

    # ---- figures

    async def figures(self, first: Look, last: Look) -> Figures:
        replicas = [one async for one in paused(self._replicas(first, last))]
        at_a_time = max(1, CONSIDERED_AT_A_TIME // max(1, len(self.members)))
        chosen = [held(one) async for one in paused(self._decided_since(first.newest), by=at_a_time)]
        router = router_figures(self.policy, first.router, last.router, chosen)
        return Figures(window_s=max(last.at_s - first.at_s, 1e-3), router=router, replicas=tuple(replicas))

    def _replicas(self, first: Look, last: Look) -> Iterator[ReplicaFigures]:
        for name, (member, now) in last.replicas.items():
            if member not in self.members:
                continue
            joined, before = first.replicas.get(name, (None, None))
            readings = [each[name] for each in self._readings if name in each]
            own_figures = partial(self._metrics.figures, member)
            yield replica_figures(before if joined is member else None, readings, now, own_figures)

    def _decided_since(self, before: PastDecision | None) -> list[PastDecision]:
        """The newest decisions, newest first, within MAX_CONSIDERED candidates."""
        most = min(MAX_CHOICES, MAX_CONSIDERED // max(1, len(self.members)))
        newest_first = islice(reversed(self.history.decisions), most)
        return [one for one in takewhile(lambda one: one is not before, newest_first) if one.outcome.chosen is not None]


def held(one: PastDecision) -> tuple[float, str, bool]:
    """Return when, and where, it went, and whether that replica held more than others did."""
    decision, outcome = one.decision, one.outcome
    matched, chosen = decision.question.matched, outcome.chosen or ""
    able = zip(decision.candidates, decision.costs, strict=True) if matched else ()
    tokens = {one.name: matched.get(one.slot, 0) for one, cost in able if cost != INFINITE or one.name == chosen}
    ours = tokens.pop(chosen, 0)
    return outcome.ts - outcome.duration_s, chosen, ours > max(tokens.values(), default=0)
