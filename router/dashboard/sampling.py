"""Records a point of the fleet's and each replica's time series every few seconds."""

import asyncio
import logging
import time
from collections.abc import Sequence

from msgspec import Struct

from router.core import Router
from router.dashboard.other_workers import OtherWorkers
from router.dashboard.pauses import paused
from router.dashboard.series import Series
from router.members.counts import ReplicaCounts, counts_of
from router.members.members import Member

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


class Sampled(Struct):
    """One replica at the last points."""

    member: Member
    counts: ReplicaCounts  # at the newest point
    before: ReplicaCounts  # at the previous point: current rates are since then
    series: Series

    def move(self, counts: ReplicaCounts, at_s: float, values: Sequence[float | None]) -> None:
        self.before, self.counts = self.counts, counts
        self.series.add(at_s, values)


class Sampling:
    """Call `run` for the router's lifetime."""

    def __init__(self, router: Router) -> None:
        self.fleet = Series(FLEET_SERIES, FLEET_POINTS)
        self.taken = 0  # points since the start
        self.saved_tokens, self.saved_s = 0, 0.0  # by caches until the newest point, also of replicas that have left
        self.before_s = self._at_s = router.now_s()
        self.unserved_before = self._unserved = 0
        self.others = OtherWorkers(router.colleagues)
        self._router = router
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
        router, at_s, now_s = self._router, time.time(), self._router.now_s()
        over_s = max(1e-3, now_s - self._at_s)
        total, in_flight, waiting, queued, up = ReplicaCounts(), 0, self.waiting(), 0.0, 0
        looked: list[tuple[Sampled, ReplicaCounts, Sequence[float | None]]] = []
        async for member in paused(list(router.members)):
            sampled, counts = self.sampled(member), self.counts(member)
            if sampled is None:
                sampled = Sampled(member, ReplicaCounts(), ReplicaCounts(), Series(REPLICA_SERIES, REPLICA_POINTS))
            since, candidate = counts.since(sampled.counts), member.candidate
            looked.append((sampled, counts, self._values(member, since, over_s)))
            total.add(since)
            in_flight += self.in_flight(member)
            waiting += candidate.waiting
            queued += candidate.queued_tokens
            up += candidate.unavailable is None
        unserved = self.unserved()
        values = (
            *(total.ttft_s(share) for share in (0.5, 0.9, 0.99)),
            total.requests / over_s,
            total.prompt_tokens / over_s,
            total.hit_predicted(),
            total.hit_reported(),
            in_flight,
            waiting,
            queued,
            (total.errors + unserved - self._unserved) / over_s,
            up,
            total.generated_tokens / over_s,
        )
        # All or nothing: after an error above, the next point covers the longer time for every replica.
        for sampled, counts, of_replica in looked:
            sampled.move(counts, at_s, of_replica)
        self.fleet.add(at_s, values)
        self.saved_tokens += total.cached_tokens
        self.saved_s += total.saved_s
        self.before_s, self._at_s = self._at_s, now_s
        self.unserved_before, self._unserved = self._unserved, unserved
        self._replicas = {sampled.member.name: sampled for sampled, _, _ in looked}
        self.taken += 1

    # ---- of all workers

    def counts(self, member: Member) -> ReplicaCounts:
        counts = counts_of(member, self._router.feeds)
        counts.add(self.others.counts(member.name))
        return counts

    def in_flight(self, member: Member) -> int:
        return member.candidate.in_flight + self.others.in_flight(member.name)

    def waiting(self) -> int:
        return len(self._router.waiting) + self.others.waiting

    def unserved(self) -> int:
        return unserved_by(self._router) + self.others.unserved

    # ---- current rates

    def recently(self, member: Member) -> ReplicaCounts:
        """The member's counts since `before_s`."""
        counts = self.counts(member)
        sampled = self.sampled(member)
        return counts if sampled is None else counts.since(sampled.before)

    def over_s(self) -> float:
        """The time that `recently` covers: one to two intervals."""
        return max(LEAST_S, self._router.now_s() - self.before_s)

    def _values(self, member: Member, since: ReplicaCounts, over_s: float) -> Sequence[float | None]:
        """In the order of REPLICA_SERIES."""
        return (
            since.requests / over_s,
            since.prompt_tokens / over_s,
            since.hit_predicted(),
            since.hit_reported(),
            self.in_flight(member),
            member.candidate.queued_tokens,
            since.ttft_s(0.5),
            since.ttft_s(0.99),
        )

    def sampled(self, member: Member) -> Sampled | None:
        """The member at the last points; None if it joined later."""
        sampled = self._replicas.get(member.name)
        return sampled if sampled is not None and sampled.member is member else None


def unserved_by(router: Router) -> int:
    return sum(router.history.counts.refused.get(code, 0) for code in UNSERVED)
