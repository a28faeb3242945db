"""The answers that the dashboard asks for each second: a frame of the fleet, its past, and the page of one replica.

A frame is made for all who ask within a second, and only while somebody asks.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import islice
from operator import attrgetter
from typing import Any

import msgspec
from msgspec.structs import asdict

from router.config import RouterConfig
from router.dashboard.alerts import Alerts
from router.dashboard.rows import Fleet, Query, select_rows
from router.dashboard.sampling import EVERY_S, REPLICA_POINTS, REPLICA_SERIES, Series
from router.dashboard.sharing import SharedPrefixes
from router.dashboard.status import Statuses, for_clients
from router.lifecycle import Lifecycle
from router.members.members import Member
from router.proxy.request_summary import PastDecision
from router.responses import DecisionRecord
from router.workers.colleagues import Colleagues
from router.workers.questions import DECIDED

FRAME_S = 0.9  # pages ask each second
LINGER_S = 10.0  # alerts are kept this long after the last question
MAX_DECISIONS = 20
MAX_MODELS = 100
MAX_QUERIES = 64  # frames that are kept, each for another query


@dataclass(eq=False)
class Dashboard:
    """Run the `sampling` of its statuses for the router's lifetime."""

    config: RouterConfig
    lifecycle: Lifecycle
    colleagues: Colleagues | None
    statuses: Statuses
    alerts: Alerts
    prefixes: SharedPrefixes
    _fleet: Fleet | None = None
    _decisions: Sequence[DecisionRecord] = ()
    _frames: dict[tuple[Query, bool], bytes] = field(default_factory=dict)  # those of this fleet that were asked for
    _making: asyncio.Lock = field(default_factory=asyncio.Lock)
    _forgetting: asyncio.TimerHandle | None = None

    async def frame(self, query: Query, *, admin: bool) -> bytes:
        async with self._making:
            if self._forgetting is not None:
                self._forgetting.cancel()
            self._forgetting = asyncio.get_running_loop().call_later(LINGER_S, self.forget)
            fleet = self._fleet
            if fleet is None or self.statuses.sampling.now_s() - fleet.at_s >= FRAME_S:
                fleet, decisions = await self.statuses.fleet(), decided(self.statuses.decisions)
                if self.colleagues is not None:
                    for there in (await self.colleagues.told(DECIDED)).values():
                        decisions += there
                    decisions = sorted(decisions, key=attrgetter("ts"), reverse=True)[:MAX_DECISIONS]
                await self.alerts.see(fleet)
                self._frames.clear()
                self._fleet, self._decisions = fleet, decisions
            if (made := self._frames.get((query, admin))) is not None:
                return made
            if len(self._frames) >= MAX_QUERIES:
                self._frames.clear()
            made = self._frames[query, admin] = msgspec.json.encode(self._content(fleet, query, admin=admin))
            return made

    def _content(self, fleet: Fleet, query: Query, *, admin: bool) -> dict[str, Any]:
        config, shown = self.config, select_rows(fleet, query)
        return {
            "at": fleet.at,
            "totals": fleet.totals,
            "states": fleet.states,
            "shown": shown[0],
            "replicas": shown[1] if admin else [for_clients(one) for one in shown[1]],
            "decisions": self._decisions if admin else None,
            "alerts": self.alerts.report,
            "models": list(islice(self.statuses.members.models, MAX_MODELS)),
            "points": self.statuses.sampling.taken,
            "router": {
                "version": version("warmroute"),
                "role": "admin" if admin else "reader",
                "keyed": config.demand_key,
                "shows_prompts": config.shows_texts,
                "policy": config.policy,
                "started": self.lifecycle.started,
                "price_per_million_tokens": config.price_per_million_tokens,
            },
        }

    def forget(self) -> None:
        """Let go of the last frame and of what alerts compare: nobody looks."""
        self._fleet = None
        self._frames.clear()
        self.alerts.forget()

    def history(self) -> dict[str, Any]:
        """The past of the fleet."""
        return {"interval_s": EVERY_S, **self.statuses.sampling.fleet.columns()}

    def replica(self, member: Member, *, admin: bool) -> dict[str, Any]:
        """The page of one replica."""
        statuses, sampling = self.statuses, self.statuses.sampling
        replica, feed = statuses.one(member), member.feed
        sampled, done, recent = sampling.sampled(member), sampling.counts(member), sampling.recently(member)
        series = Series(REPLICA_SERIES, REPLICA_POINTS) if sampled is None else sampled.series
        over_s, stream = sampling.over_s(), None
        if replica.events is not None and feed is not None:
            stream = {
                **asdict(replica.events),
                "batches": feed.view.stream.stats.batches,
                "stored_blocks": feed.stored,
                "removed_blocks": feed.removed,
                "stored_per_s": round(recent.stored_blocks / over_s, 3),
                "removed_per_s": round(recent.removed_blocks / over_s, 3),
                "digest_checks": feed.view.stream.stats.digests_compared,
            }
        return {
            "replica": replica if admin else for_clients(replica),
            "stream": stream,
            "counts": {
                **{name: getattr(done, name) for name in ("requests", "errors", "prompt_tokens", "matched_tokens")},
                "predictions": member.accuracy.compared,
                "wrong_predictions": member.accuracy.different,
                "resyncs": member.resyncs,
                "faults": member.server.faults,
            },
            "history": {"interval_s": EVERY_S, **series.columns()},
        }


def decided(decisions: deque[PastDecision]) -> list[DecisionRecord]:
    """This worker's newest decisions, without their candidates."""
    return [past.record(briefly=True) for past in islice(reversed(decisions), MAX_DECISIONS)]
