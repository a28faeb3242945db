"""Figures of the fleet and of each replica, all workers together: a point every few seconds, and frames on demand."""

import asyncio
import logging
import math
import struct
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from msgspec import Struct

from router.dashboard.doctor.index_rules import LAG_BATCHES
from router.dashboard.rows import INEXACT, STATES, Fleet, Row, Totals
from router.dashboard.status import Statuses
from router.members.counts import ReplicaCounts, counts_of
from router.members.members import Member
from router.placement.waiting import Waiting
from router.proxy.request_summary import RequestCounts
from router.responses import ReplicaStatus
from router.workers.colleagues import Colleagues
from router.workers.questions import FIGURES, Figures

log = logging.getLogger(__name__)

EVERY_S = 5.0
DRAINS = "it drains"  # the router's reason for a replica that reports draining
LEAST_S = 1.0  # a rate over less time means nothing
FLEET_POINTS = 360  # half an hour
REPLICA_POINTS = 120  # ten minutes
FLEET_SERIES = (
    "ttft_p50_s",
    "ttft_p90_s",
    "ttft_p99_s",
    "requests_per_s",
    "prompt_tokens_per_s",
    "hit_predicted",
    "hit_reported",
    "in_flight",
    "waiting",
    "queued_tokens",
    "errors_per_s",
    "replicas_up",
    "generated_tokens_per_s",
)
REPLICA_SERIES = (
    "requests_per_s",
    "prompt_tokens_per_s",
    "hit_predicted",
    "hit_reported",
    "in_flight",
    "queued_tokens",
    "ttft_p50_s",
    "ttft_p99_s",
)
UNSERVED = ("no_replica", "queue_full")  # refusals that count as errors of the fleet
DIGITS = 6  # a four-byte float has so many
AT_A_TIME = 50  # replicas: less than a millisecond
_NOTHING = Figures({}, 0, 0)  # counted by a worker before its first answer

T = TypeVar("T")


async def paused(many: Iterable[T], by: int = AT_A_TIME) -> AsyncIterator[T]:
    """Yield them with pauses in between, in which requests are served."""
    for number, one in enumerate(many, 1):
        yield one
        if number % by == 0:
            await asyncio.sleep(0)


def rates(counts: ReplicaCounts, over_s: float, quantiles: Iterable[int] = (50,)) -> dict[str, float | None]:
    """Return rates, shares and times of what was counted in this time."""
    return {
        "requests_per_s": round(counts.requests / over_s, 3),
        "prompt_tokens_per_s": round(counts.prompt_tokens / over_s, 1),
        "generated_tokens_per_s": round(counts.generated_tokens / over_s, 1),
        "token_s": counts.token_s(),
        "hit_predicted": counts.hit_predicted(),
        "hit_reported": counts.hit_reported(),
        **{f"ttft_p{quantile}_s": counts.ttft_s(quantile / 100) for quantile in quantiles},
    }


class Series:
    """The newest points of a few values. Unknown values are None, stored as NaN."""

    def __init__(self, names: tuple[str, ...], most: int) -> None:
        self.names = names
        self._at_s: deque[float] = deque(maxlen=most)
        self._values: deque[bytes] = deque(maxlen=most)  # of each point: floats take an eighth of the room of objects
        self._packed = struct.Struct(f"{len(names)}f")

    def add(self, at_s: float, values: Sequence[float | None]) -> None:
        self._at_s.append(at_s)
        self._values.append(self._packed.pack(*(math.nan if value is None else value for value in values)))

    def columns(self) -> dict[str, list[float | None]]:
        """Times under `at` and values under their names, oldest first."""
        points = [self._packed.unpack(values) for values in self._values]
        columns: dict[str, list[float | None]] = {"at": [round(at_s, 3) for at_s in self._at_s]}
        for place, name in enumerate(self.names):
            column = (point[place] for point in points)
            columns[name] = [float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None for value in column]
        return columns


class OtherWorkers:
    """The part that other workers count: sums that do not fall when one ends; without colleagues they stay at zero."""

    def __init__(self, colleagues: Colleagues | None) -> None:
        self.waiting = 0
        self.unserved = 0
        self._colleagues = colleagues
        self._counts: dict[str, ReplicaCounts] = {}
        self._in_flight: dict[str, int] = {}
        self._last: dict[int, Figures] = {}
        self._begins_late = colleagues is not None and colleagues.place.replaces  # the past is no news

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
                before = self._last.get(number, _NOTHING)
                self.unserved += figures.unserved - (before.unserved if before.unserved <= figures.unserved else 0)
                for name, one in figures.replicas.items():
                    last, counts = before.replicas.get(name), one.counts
                    # Counts that fell have begun anew, at a worker or a replica that has.
                    if last is not None and last.counts.requests <= counts.requests:
                        counts = counts.since(last.counts)
                    self._counts.setdefault(name, ReplicaCounts()).add(counts)
        self._last = {**self._last, **found}
        self.waiting = sum(figures.waiting for figures in found.values())
        self._in_flight = {}
        for figures in found.values():
            for name, one in figures.replicas.items():
                self._in_flight[name] = self._in_flight.get(name, 0) + one.in_flight
        self._counts = {name: counts for name, counts in self._counts.items() if name in self._in_flight}


class Sampled(Struct):
    """One replica at the last points."""

    member: Member
    counts: ReplicaCounts  # counts at the newest point
    before: ReplicaCounts  # counts at the previous point: current rates are since then
    series: Series

    def move(self, counts: ReplicaCounts, at_s: float, values: Sequence[float | None]) -> None:
        self.before, self.counts = self.counts, counts
        self.series.add(at_s, values)


# The fields of a row that are those of the replica's status, of its load, and of its event stream; None: it has none.
OF_STATUS = ("name", "engine", "why", "state", "inexact", "breaker", "trust", "honesty", "taken_names", "role")
OF_LOAD = ("running", "waiting", "queued_tokens", "prefill_tokens_per_s")
OF_FEED = ("lag_batches", "gaps", "repairs", "restarts", "digest_mismatches", "lost_batches")
SUMS = ("in_flight", "running", "waiting", "queued_tokens", "blocks")  # sums over all rows


@dataclass(eq=False)
class Sampling:
    """Call `run` for the router's lifetime."""

    statuses: Statuses
    queue: Waiting[Any]
    requests: RequestCounts
    others: OtherWorkers

    def __post_init__(self) -> None:
        self.fleet = Series(FLEET_SERIES, FLEET_POINTS)
        self.taken = 0  # points since the start
        self.saved_tokens, self.saved_s = 0, 0.0  # by caches until the newest point, also of replicas that have left
        self._members, self._now_s = self.statuses.members, self.statuses.now_s
        self._before_s = self._at_s = self._now_s()
        self._unserved_before = self._unserved = 0
        self._replicas: dict[str, Sampled] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                await self.sample()
            except Exception:  # any mistake here costs a point; an ended task would stop the router
                log.exception("Internal error while sampling for the dashboard")

    async def sample(self) -> None:
        await self.others.look()
        at_s, now_s = time.time(), self._now_s()
        over_s = max(1e-3, now_s - self._at_s)
        total, in_flight, waiting, queued, up = ReplicaCounts(), 0, self.waiting(), 0.0, 0
        looked: list[tuple[Sampled, ReplicaCounts, Sequence[float | None]]] = []
        async for member in paused(list(self._members)):
            sampled, counts = self.sampled(member), self.counts(member)
            if sampled is None:
                sampled = Sampled(member, ReplicaCounts(), ReplicaCounts(), Series(REPLICA_SERIES, REPLICA_POINTS))
            since, candidate = counts.since(sampled.counts), member.candidate
            running = self.in_flight(member)
            own = rates(since, over_s, (50, 99))
            own |= {"in_flight": running, "queued_tokens": candidate.queued_tokens}
            looked.append((sampled, counts, [own[name] for name in REPLICA_SERIES]))
            total.add(since)
            in_flight += running
            waiting += candidate.waiting
            queued += candidate.queued_tokens
            up += candidate.unavailable is None
        unserved = self.unserved()
        values = {
            **rates(total, over_s, (50, 90, 99)),
            "in_flight": in_flight,
            "waiting": waiting,
            "queued_tokens": queued,
            "errors_per_s": (total.errors + unserved - self._unserved) / over_s,
            "replicas_up": up,
        }
        # All or nothing: after an error above, the next point covers the longer time for every replica.
        for sampled, counts, of_replica in looked:
            sampled.move(counts, at_s, of_replica)
        self.fleet.add(at_s, [values[name] for name in FLEET_SERIES])
        self.saved_tokens += total.cached_tokens
        self.saved_s += total.saved_s
        self._before_s, self._at_s = self._at_s, now_s
        self._unserved_before, self._unserved = self._unserved, unserved
        self._replicas = {sampled.member.name: sampled for sampled, _, _ in looked}
        self.taken += 1

    # ---- of all workers

    def counts(self, member: Member) -> ReplicaCounts:
        counts = counts_of(member, self.statuses.feeds)
        counts.add(self.others.counts(member.name))
        return counts

    def in_flight(self, member: Member) -> int:
        return member.candidate.in_flight + self.others.in_flight(member.name)

    def waiting(self) -> int:
        return len(self.queue) + self.others.waiting

    def unserved(self) -> int:
        return unserved_by(self.requests) + self.others.unserved

    # ---- current rates

    def recently(self, member: Member) -> ReplicaCounts:
        """The member's counts since `before_s`."""
        counts = self.counts(member)
        sampled = self.sampled(member)
        return counts if sampled is None else counts.since(sampled.before)

    def over_s(self) -> float:
        """The time that `recently` covers: one to two intervals."""
        return max(LEAST_S, self._now_s() - self._before_s)

    def sampled(self, member: Member) -> Sampled | None:
        """The member at the last points; None if it joined later."""
        sampled = self._replicas.get(member.name)
        return sampled if sampled is not None and sampled.member is member else None

    # ---- frames

    async def look(self) -> Fleet:
        """A frame of the whole fleet, made with pauses for requests."""
        statuses, members = self.statuses, self._members
        await self.others.look()
        recent, rows, replicas = ReplicaCounts(), [], []
        idle = statuses.idle(members)
        async for member in paused(list(members)):
            if member in members:  # it may have left during a pause
                replica = statuses.of(member, idle.get(member.name))
                row, counts = self.row(member, replica)
                recent.add(counts)
                rows.append(row)
                replicas.append(replica)
        await asyncio.sleep(0)
        states = Counter(row.state for row in rows) + Counter(row.status for row in rows)
        return Fleet(
            at=round(time.time(), 3),
            at_s=statuses.now_s(),
            totals=self._totals(rows, recent),
            states={state: states[state] for state in STATES},
            rows=rows,
            replicas=replicas,
        )

    def row(self, member: Member, replica: ReplicaStatus) -> tuple[Row, ReplicaCounts]:
        """The replica's status with what it has done recently, all workers together."""
        health, feed, in_flight = member.health, replica.events, self.in_flight(member)
        recent, over_s = self.recently(member), self.over_s()
        status: Literal["up", "down", "draining"] = "up" if replica.available else "down"
        if status == "down" and (health.draining or health.resting == DRAINS):
            status = "draining"
        behind = feed is not None and feed.lag_batches >= LAG_BATCHES
        lame = status == "draining" or replica.state in INEXACT or replica.breaker != "closed"
        severity = int(lame or behind or recent.errors > 0)  # 2: serves no requests; 1: needs attention; 0: well
        if status == "down" or replica.breaker == "open":
            severity = 2
        load, total_tokens = replica.load, (replica.load.total_blocks or 0) * member.block_size
        cache_used = None
        if load.empty_tokens is not None and total_tokens:
            cache_used = round(max(0.0, 1 - load.empty_tokens / total_tokens), 4)
        heard_age_s = replica.heard_age_s
        if heard_age_s is None and feed is not None:
            heard_age_s = feed.last_event_age_s
        same: dict[str, Any] = {name: getattr(replica, name) for name in OF_STATUS}
        same |= {name: getattr(load, name) for name in OF_LOAD}
        same |= {name: getattr(feed, name, None) for name in OF_FEED}
        same |= rates(recent, over_s)
        del same["prompt_tokens_per_s"]
        return Row(
            **same,
            model=member.models[0] if member.models else None,
            models=len(member.models),
            status=status,
            severity=severity,
            in_flight=in_flight,
            blocks=sum(replica.index.blocks.values()),
            accuracy=replica.index.accuracy,
            faults=member.server.faults,
            cache_used=cache_used,
            heard_age_s=None if heard_age_s is None else round(heard_age_s, 3),
            idle=None if recent.requests or in_flight else replica.idle,
        ), recent

    def _totals(self, rows: list[Row], recent: ReplicaCounts) -> Totals:
        over_s = self.over_s()
        unserved = self.unserved() - self._unserved_before
        figures: dict[str, Any] = {name: sum(getattr(row, name) for row in rows) for name in SUMS}
        figures |= rates(recent, over_s, (50, 90, 99))
        return Totals(
            **figures,
            replicas=len(rows),
            up=sum(row.why is None for row in rows),
            waiting_here=self.waiting(),
            errors_per_s=round((recent.errors + unserved) / over_s, 3),
            index_bytes=self.statuses.placement.index.bytes_used(),
            saved_tokens=self.saved_tokens,
            saved_s=round(self.saved_s, 3),
        )


def unserved_by(counts: RequestCounts) -> int:
    return sum(counts.refused.get(code, 0) for code in UNSERVED)
