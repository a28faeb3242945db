"""Polls the replicas' own /metrics in a small fleet, while a dashboard is open."""

import asyncio
from collections import deque

from router.core import Router
from router.doctor.engine_metrics import READ, engine_figures
from router.doctor.figures import EngineFigures
from router.doctor.samples import BadMetrics, Samples
from router.members.broken import Broken
from router.members.fetch import fetch
from router.members.members import Member, Server

MOST_REPLICAS = 32  # a larger fleet would take too long to poll
TIMEOUT_S = 2.0
KEPT = 3  # samples of each replica; the oldest is compared with the newest


class ReplicaMetrics:
    """Call `poll` regularly, and `forget` when the last dashboard closed."""

    def __init__(self, router: Router) -> None:
        self._router = router
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
        members = list(self._router.members)
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
            self._samples.setdefault(member, deque(maxlen=KEPT)).append(own)
