"""Alerts: the rules of `warmroute doctor`, applied to two snapshots of the running router.

Rules that need a replica's own /metrics apply in small fleets only.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from router.console.samples import BadMetrics, Samples
from router.dashboard.doctor.engine_metrics import READ, engine_figures
from router.dashboard.doctor.figures import (
    SAID,
    DecisionSample,
    EngineFigures,
    Figures,
    ReplicaFigures,
    RouterFigures,
    RoutingFigures,
)
from router.dashboard.doctor.findings import Finding
from router.dashboard.doctor.rules import RULES, found
from router.dashboard.rows import Fleet, Row
from router.dashboard.sampling import paused
from router.members.broken import Broken
from router.members.feeds import Feeds
from router.members.fetch import fetch
from router.members.members import Member, Members, Server, approximate_prompts
from router.placement.cost import INFINITE
from router.placement.index import PrefixIndex
from router.placement.prices import GPU
from router.proxy.request_summary import PastDecision
from router.records.history import History
from router.responses import FeedState

EVERY_S = 5.0
LOOKS = 3  # the oldest is compared with the newest
READINGS = 12  # of the queues, one per frame
FEW_READINGS = 3  # with fewer, a lag may be momentary
MOST_REPLICAS = 32  # whose own /metrics are polled: a larger fleet would take too long
TIMEOUT_S = 2.0
MOST_CHOICES = 500
MOST_CONSIDERED = 200_000  # candidates of all decisions together
MOST_ALERTS = 50
MOST_ENDED = 10
ENDED_FOR_S = 600.0  # that an alert is shown after its end
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


# Counters of one replica, named as in `RoutingFigures`.
OF_FEED = ("lost_batches", "gaps", "repairs", "digest_mismatches", "restarts")
OF_TALLIES = ("prompt_tokens", "matched_tokens", "resent_tokens", "salted", "new_salts", "billed")


class Seen(NamedTuple):
    """One replica at one moment."""

    member: Member
    counted: Counter[str]
    gpu_blocks: int


class Look(NamedTuple):
    at_s: float
    replicas: dict[str, Seen]
    refused: Counter[str]
    approximate: Counter[str]
    newest: PastDecision | None


class Reading(NamedTuple):
    busy: float
    queued_tokens: float
    lag_batches: int


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
        if len(members) > MOST_REPLICAS:
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
    feeds: Feeds
    index: PrefixIndex
    history: History

    def __post_init__(self) -> None:
        self.report = AlertReport()
        self._metrics = ReplicaMetrics(self.members)
        self._alerts: dict[tuple[str, str | None], Alert] = {}  # by rule and replica
        self._ended: deque[Alert] = deque(maxlen=MOST_ENDED)
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
        self._readings.append(
            {
                row.name: Reading(
                    max(row.in_flight, row.running + row.waiting), row.queued_tokens, row.lag_batches or 0
                )
                async for row in paused(fleet.rows, by=ROWS_AT_A_TIME)
            }
        )
        if not self._looks or fleet.at_s - self._looks[-1].at_s >= EVERY_S:
            self._looks.append(await self._look(fleet.at_s))
            await self._judge(fleet)
            self._metrics.poll()

    async def _look(self, at_s: float) -> Look:
        members, history, replicas = self.members, self.history, {}
        async for member in paused(list(members)):
            gpu_blocks = self.index.blocks(member.slot).get(GPU, 0) if member in members else 0
            replicas[member.name] = Seen(member, _counted(member, self.feeds.state(member.name)), gpu_blocks)
        approximate: Counter[str] = Counter()
        for (_, reason), count in approximate_prompts(members.models.values()).items():
            approximate[reason] += count
        newest = history.decisions[-1] if history.decisions else None
        return Look(at_s, replicas, history.counts.refused.copy(), approximate, newest)

    async def _judge(self, fleet: Fleet) -> None:
        figures = await self.figures(fleet, self._looks[0], self._looks[-1])
        findings: list[Finding] = []
        for rule in RULES:
            await asyncio.sleep(0)
            findings += found(rule, figures)
        now = round(time.time(), 3)
        before, self._alerts = self._alerts, {}
        for one in findings:
            key = one.rule, one.replica
            since = before[key].since if key in before else now
            self._alerts[key] = Alert(one.rule, one.replica, one.what, one.turn, one.figures, since)
        self._ended.extendleft(replace(one, until=now) for key, one in before.items() if key not in self._alerts)
        self.report = AlertReport(
            judged_at=now,
            window_s=round(figures.window_s, 1),
            truncated=max(0, len(findings) - MOST_ALERTS),
            alerts=list(islice(self._alerts.values(), MOST_ALERTS)),
            ended=[one for one in self._ended if one.until is not None and now - one.until < ENDED_FOR_S],
        )

    # ---- figures

    async def figures(self, fleet: Fleet, first: Look, last: Look) -> Figures:
        replicas = [replica async for replica in paused(self._replicas(fleet, first, last))]
        router = await self._of_router(first, last)
        return Figures(window_s=max(last.at_s - first.at_s, 1e-3), router=router, replicas=tuple(replicas))

    def _replicas(self, fleet: Fleet, first: Look, last: Look) -> Iterator[ReplicaFigures]:
        for row in fleet.rows:
            now = last.replicas.get(row.name)
            if now is None or now.member not in self.members:
                continue
            before = first.replicas.get(row.name)
            if before is None or before.member is not now.member:  # it joined in between
                before = Seen(now.member, Counter(), 0)
            follows = row.lag_batches is not None
            own = self._metrics.figures(
                now.member, (now.gpu_blocks, now.gpu_blocks - before.gpu_blocks) if follows else None
            )
            readings = [reading[row.name] for reading in self._readings if row.name in reading]
            yield ReplicaFigures(
                name=row.name,
                engine=row.engine,
                model=row.model or "",
                block_tokens=(own.block_tokens if own else 0) or now.member.block_size,
                own=own,
                routed=_routed(row, readings, before.counted, now),
            )

    async def _of_router(self, first: Look, last: Look) -> RouterFigures:
        choices: list[DecisionSample] = []
        missed = tokens = 0.0
        at_a_time = max(1, CONSIDERED_AT_A_TIME // max(1, len(self.members)))
        async for one in paused(self._decided_since(first.newest), by=at_a_time):
            ours, others = held(one)
            missed += max(0.0, others - ours)
            outcome = one.outcome
            tokens += outcome.prompt_tokens
            begun_s = outcome.ts - outcome.duration_s
            choices.append(DecisionSample(at_s=begun_s, replica=outcome.chosen or "", cached=ours > others))
        return RouterFigures(
            policy=self.policy,
            requests=sum(
                now.counted["requests"] - before.counted["requests"]
                for name, now in last.replicas.items()
                if (before := first.replicas.get(name)) is not None and before.member is now.member
            ),
            refused={code: float(count) for code, count in (last.refused - first.refused).items()},
            approximate={reason: float(count) for reason, count in (last.approximate - first.approximate).items()},
            missed_tokens=missed,
            chosen_tokens=tokens,
            choices=tuple(choices),
        )

    def _decided_since(self, before: PastDecision | None) -> list[PastDecision]:
        """The newest decisions, newest first, within MOST_CONSIDERED candidates."""
        most = min(MOST_CHOICES, MOST_CONSIDERED // max(1, len(self.members)))
        newest_first = islice(reversed(self.history.decisions), most)
        return [one for one in takewhile(lambda one: one is not before, newest_first) if one.outcome.chosen is not None]


def held(one: PastDecision) -> tuple[float, float]:
    """Tokens of the prompt that the chosen replica held, and the most that another eligible replica held."""
    decision = one.decision
    matched = decision.question.matched
    ours, others = 0.0, 0.0
    for candidate, cost in zip(decision.candidates, decision.costs, strict=True) if matched else ():
        tokens = matched.get(candidate.slot, 0)
        if candidate.name == one.outcome.chosen:
            ours = tokens
        elif tokens > others and cost != INFINITE:
            others = tokens
    return ours, others


# ---- one replica


def _counted(member: Member, feed: FeedState | None) -> Counter[str]:
    tallies, accuracy = member.tallies.values(), member.accuracy
    counted = Counter(
        resyncs=member.resyncs,
        faults=member.server.faults,
        predictions=accuracy.compared,
        wrong_predictions=accuracy.different,
        wrong_blocks=accuracy.error_blocks,
        requests=sum(sum(tally.statuses.values()) for tally in tallies),
        refused=sum(tally.statuses.get(429, 0) for tally in tallies),
        reported_blocks=sum(tally.blocks_reported for tally in tallies),
        **{name: sum(getattr(tally, name) for tally in tallies) for name in OF_TALLIES},
    )
    if feed is not None:
        counted.update({name: getattr(feed, name) for name in OF_FEED})
    return counted


def _routed(row: Row, readings: Sequence[Reading], before: Counter[str], now: Seen) -> RoutingFigures:
    told: dict[str, Any] = {
        **{name: getattr(row, name) for name in SAID},
        **(now.counted - before),  # without those that fell, as they were reset
    }
    return RoutingFigures(
        **told,
        available=row.why is None,
        overclaim=row.overclaim,
        has_events=row.lag_batches is not None and row.state != "approximate",
        lag_batches=min((one.lag_batches for one in readings), default=0) if len(readings) >= FEW_READINGS else 0,
        index_blocks=now.gpu_blocks,
        busy=tuple(one.busy for one in readings),
        queued_tokens=tuple(one.queued_tokens for one in readings),
    )
