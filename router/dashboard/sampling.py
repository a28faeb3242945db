"""Counts of the fleet and of each replica, all workers together: a point every few seconds, and those since."""

import asyncio
import logging
import math
import struct
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec import Struct

from router.members.counts import ReplicaCounts, counts_of
from router.members.members import Member, Members
from router.placement.waiting import Waiting
from router.proxy.request_summary import RequestCounts
from router.workers.colleagues import Colleagues
from router.workers.questions import FIGURES, Figures

log = logging.getLogger(__name__)

EVERY_S = 5.0
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
DIGITS = 6  # a four-byte float has this many
AT_A_TIME = 50  # replicas: less than a millisecond
_NOTHING = Figures({}, 0, 0)  # counted by a worker before its first answer

T = TypeVar("T")


async def paused(many: Iterable[T], by: int = AT_A_TIME) -> AsyncIterator[T]:
    """Yield them with pauses in between, in which requests are served."""
    for number, one in enumerate(many, 1):
        yield one
        if number % by == 0:
            await asyncio.sleep(0)


def rates(counts: ReplicaCounts, over_s: float, quantiles: Iterable[int] = (50,), *, errors: int = 0) -> dict[str, Any]:
    """Return rates, shares and times of what was counted in this time; `errors`: those at no replica."""
    return {
        "requests_per_s": round(counts.requests / over_s, 3),
        "errors_per_s": round((counts.errors + errors) / over_s, 3),
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
        self._values: deque[bytes] = deque(maxlen=most)  # one float per point takes an eighth of an object's room
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
        self._begins_late = colleagues is not None and colleagues.place.joins  # the past is no news

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


@dataclass(eq=False)
class Sampling:
    """Call `run` for the router's lifetime."""

    members: Members
    now_s: Callable[[], float]
    queue: Waiting[Any]
    requests: RequestCounts
    others: OtherWorkers

    def __post_init__(self) -> None:
        self.fleet = Series(FLEET_SERIES, FLEET_POINTS)
        self.taken = 0  # points since the start
        self.past = ReplicaCounts()  # until the newest point, of replicas that left, too
        self._before_s = self._at_s = self.now_s()
        self.unserved_before = self._unserved = 0
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
        at_s, now_s = time.time(), self.now_s()
        over_s = max(1e-3, now_s - self._at_s)
        total, in_flight, waiting, queued, up = ReplicaCounts(), 0, self.waiting(), 0.0, 0
        looked: list[tuple[Sampled, ReplicaCounts, Sequence[float | None]]] = []
        async for member in paused(list(self.members)):
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
            **rates(total, over_s, (50, 90, 99), errors=unserved - self._unserved),
            "in_flight": in_flight,
            "waiting": waiting,
            "queued_tokens": queued,
            "replicas_up": up,
        }
        # All or nothing: after an error above, the next point covers the longer time for every replica.
        for sampled, counts, of_replica in looked:
            sampled.move(counts, at_s, of_replica)
        self.fleet.add(at_s, [values[name] for name in FLEET_SERIES])
        self.past.add(total)
        self._before_s, self._at_s = self._at_s, now_s
        self.unserved_before, self._unserved = self._unserved, unserved
        self._replicas = {sampled.member.name: sampled for sampled, _, _ in looked}
        self.taken += 1

    # ---- of all workers

    def counts(self, member: Member) -> ReplicaCounts:
        counts = counts_of(member)
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
        return max(LEAST_S, self.now_s() - self._before_s)

    def sampled(self, member: Member) -> Sampled | None:
        """The member at the last points; None if it joined later."""
        sampled = self._replicas.get(member.name)
        return sampled if sampled is not None and sampled.member is member else None


def unserved_by(counts: RequestCounts) -> int:
    return sum(counts.refused.get(code, 0) for code in UNSERVED)
