"""A worker's answers to its colleagues: what it alone knows of the whole router."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from router.core import Router
from router.dashboard.broadcast import decided
from router.dashboard.sampling import unserved_by
from router.dashboard.status import not_ready
from router.members.broken import Broken
from router.members.counts import counts_of
from router.monitor.upkeep import Upkeep
from router.tenants.usage import Row, Selection
from router.workers.colleagues import Question, Told, about
from router.workers.questions import (
    CHANGES,
    DECIDED,
    EXPECT_CLEAR,
    FIGURES,
    FORGET,
    LEARN_AGAIN,
    NOT_READY,
    RECENT,
    USAGE,
    Changes,
    Figures,
    OfReplica,
    RecentlyRouted,
)


class Telling:
    def __init__(self, router: Router, upkeep: Upkeep, knows_and_serves: Callable[[], bool]) -> None:
        """`knows_and_serves`: whether this worker listens, and has the keys and rewrites that it should have."""
        self._router = router
        self._knows_and_serves = knows_and_serves
        self._upkeep = upkeep
        answers: dict[Question[Any], Callable[[Told], Awaitable[Any]]] = {
            FIGURES: self._figures,
            CHANGES: self._changes,
            NOT_READY: self._not_ready,
            RECENT: self._recent,
            DECIDED: self._decided,
            USAGE: self._usage,
            LEARN_AGAIN: self._learn_again,
            FORGET: self._forget,
            EXPECT_CLEAR: self._expect_clear,
        }
        self._answers = {question.name: answer for question, answer in answers.items()}

    async def __call__(self, told: Told) -> Any:
        return await self._answers[told.question](told)

    async def _figures(self, _: Told) -> Figures:
        router = self._router
        of_replicas = {
            member.name: OfReplica(member.candidate.in_flight, counts_of(member, router.feeds))
            for member in router.members
        }
        return Figures(of_replicas, len(router.waiting), unserved_by(router))

    async def _changes(self, _: Told) -> Changes:
        draining = [name for name, server in self._router.members.servers.items() if server.health.draining]
        return Changes(self._knows_and_serves(), self._upkeep.wanted, self._upkeep.added, draining)

    async def _not_ready(self, _: Told) -> str:
        return not_ready(self._router) or ""

    async def _recent(self, _: Told) -> RecentlyRouted:
        router = self._router
        return RecentlyRouted(router.history.recent.all(), router.history.retained.until_s(router.now_s()))

    async def _decided(self, _: Told) -> list[dict[str, Any]]:
        return decided(self._router)

    async def _usage(self, told: Told) -> list[Row]:
        ledger = self._router.ledger
        await ledger.save()
        return await ledger.unsaved(about(told, Selection))

    async def _learn_again(self, told: Told) -> bool:
        servers = self._router.members.servers
        named = [servers[name] for name in about(told, list[str]) if name in servers]
        found = await asyncio.gather(*map(self._upkeep.learn_again, named), return_exceptions=True)
        for error in found:
            if error is not None and not isinstance(error, Broken):  # its health checks judge a broken one
                raise error
        return True

    async def _forget(self, told: Told) -> bool:
        self._router.members.forget(about(told, str))
        return True

    async def _expect_clear(self, _: Told) -> bool:
        for server in self._router.members.servers.values():
            self._router.expect_clear(server)
        return True
