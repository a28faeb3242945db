"""A worker's answers to its colleagues: what it alone knows of the whole router."""

import asyncio
from typing import Any

from router.core import Router
from router.dashboard.broadcast import decided
from router.dashboard.sampling import unserved_by
from router.http.at_replicas import expect_clear
from router.members.broken import Broken
from router.members.counts import counts_of
from router.monitor.upkeep import Upkeep
from router.tenants.usage import Selection
from router.workers.colleagues import Told, about
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


async def answer_question(router: Router, upkeep: Upkeep, told: Told, *, serves: bool) -> Any:
    """`serves`: whether this worker listens, and has the keys and rewrites that it should have."""
    members, history = router.members, router.history
    match told.question:
        case FIGURES.name:
            of_replicas = {
                member.name: OfReplica(member.candidate.in_flight, counts_of(member, router.feeds))
                for member in members
            }
            return Figures(of_replicas, len(router.waiting), unserved_by(history.counts))
        case CHANGES.name:
            draining = [name for name, server in members.servers.items() if server.health.draining]
            return Changes(serves, upkeep.wanted, upkeep.added, draining)
        case NOT_READY.name:
            return router.lifecycle.not_ready() or ""
        case RECENT.name:
            return RecentlyRouted(history.recent.all(), history.retained.until_s(router.now_s()))
        case DECIDED.name:
            return decided(history.decisions)
        case USAGE.name:
            await router.ledger.save()
            return await router.ledger.unsaved(about(told, Selection))
        case LEARN_AGAIN.name:
            named = [members.servers[name] for name in about(told, list[str]) if name in members.servers]
            for error in await asyncio.gather(*map(upkeep.learn_again, named), return_exceptions=True):
                if error is not None and not isinstance(error, Broken):  # its health checks judge a broken one
                    raise error
            return True
        case FORGET.name:
            members.forget(about(told, str))
            return True
        case EXPECT_CLEAR.name:
            for server in members.servers.values():
                expect_clear(server, router.feeds, router.placement)
            return True
    raise ValueError(f"another worker asks {told.question!r}, which this one does not know")
