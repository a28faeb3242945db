"""Sends frames to open dashboards: one per second and query, made only while a dashboard is open.

A slow subscriber gets the newest frame when it is ready for one, and none of those in between.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

import msgspec

from api.errors import ApiError, draining
from router.config import RouterConfig
from router.dashboard.alerts import Alerts
from router.dashboard.rows import Fleet, Query, select_rows
from router.dashboard.sampling import EVERY_S
from router.dashboard.status import Statuses, for_clients
from router.lifecycle import Lifecycle
from router.proxy.request_summary import PastDecision
from router.responses import DecisionRecord
from router.tenants.admission import Admission
from router.tenants.keys import Key
from router.workers.colleagues import Colleagues
from router.workers.questions import DECIDED

log = logging.getLogger(__name__)

FRAME_S = 1.0
LINGER_S = 10.0  # keep alerts after the last one leaves: it may come back at once with another query
MAX_WATCHERS = 64
MAX_READERS = 48  # the limit for readers: an administrator always finds room
MAX_OF_ONE = 8  # the limit for a reader's key, or for an address where readers have none
RETRY_S = 5
MAX_DECISIONS = 20
MAX_MODELS = 100


class FeedQuery(NamedTuple):
    """Everything that a frame depends on."""

    query: Query
    admin: bool


class Subscriber(NamedTuple):
    """One open dashboard."""

    query: FeedQuery
    key: Key | None
    whose: str | bytes
    number: int  # each is another one


@dataclass(eq=False)
class Broadcast:
    """Owns the task that makes frames while there are subscribers."""

    config: RouterConfig
    lifecycle: Lifecycle
    admission: Admission
    colleagues: Colleagues | None
    statuses: Statuses
    alerts: Alerts
    _subscribers: set[Subscriber] = field(default_factory=set)
    _joined: int = 0
    _fleet: Fleet | None = None
    _decisions: Sequence[DecisionRecord] = ()
    _frames: dict[FeedQuery, bytes] = field(default_factory=dict)  # those of this fleet that were asked for
    _news: asyncio.Event = field(default_factory=asyncio.Event)  # set and replaced when there is another fleet
    _showing: asyncio.Task[None] | None = None
    _forgetting: asyncio.TimerHandle | None = None
    _closed: bool = False

    def __len__(self) -> int:
        return len(self._subscribers)

    def join(self, query: FeedQuery, key: Key | None = None, address: str = "") -> Subscriber:
        """Add a subscriber, to be removed with `leave`. Raises ApiError if there are too many or the router ends."""
        if self._closed or self.lifecycle.draining:
            raise draining()
        self._joined += 1
        subscriber = Subscriber(query, key, address if key is None else key.digest, self._joined)
        readers = [one for one in self._subscribers if not one.query.admin]
        if len(self._subscribers) >= MAX_WATCHERS:
            raise _too_many(f"{MAX_WATCHERS} dashboards are open")
        if not query.admin and len(readers) >= MAX_READERS:
            raise _too_many(f"{MAX_READERS} dashboards of readers are open")
        if not query.admin and sum(one.whose == subscriber.whose for one in readers) >= MAX_OF_ONE:
            raise _too_many(f"{MAX_OF_ONE} dashboards of one reader are open")
        self._subscribers.add(subscriber)
        if self._forgetting is not None:
            self._forgetting.cancel()
            self._forgetting = None
        if self._showing is None:
            self._showing = asyncio.create_task(self._show())
        return subscriber

    def leave(self, subscriber: Subscriber) -> None:
        self._subscribers.discard(subscriber)
        if not self._subscribers and self._showing is not None:
            self._showing.cancel()
            self._showing = self._fleet = None
            self._forgetting = asyncio.get_running_loop().call_later(LINGER_S, self.alerts.forget)

    def close(self) -> None:
        """End every stream, and refuse new ones."""
        self._closed = True
        self._tell()

    # ---- frames

    async def frames(self, subscriber: Subscriber) -> AsyncIterator[bytes]:
        config, sampling, seen = self.config, self.statuses.sampling, -1
        hello = {
            "version": version("warmroute"),
            "role": "admin" if subscriber.query.admin else "reader",
            "keyed": config.demand_key,
            "shows_prompts": config.shows_texts,
            "policy": config.policy,
            "models": self._models(),
            "started": self.lifecycle.started,
            "price_per_million_tokens": config.price_per_million_tokens,
        }
        yield event("hello", hello)
        while True:
            news = self._news
            if self._closed:
                yield event("end", {"why": "the router ends"})
                return
            if not self.admission.knows(subscriber.key, admin=subscriber.query.admin):
                yield event("end", {"why": "its API key is not valid any more"})
                return
            if self._fleet is not None:
                if (taken := sampling.taken) != seen:
                    columns = sampling.fleet.columns()
                    if seen >= 0 and taken == seen + 1:
                        yield event("point", {name: column[-1] for name, column in columns.items()})
                    else:  # it has missed some
                        yield event("history", {"interval_s": EVERY_S, **columns})
                    seen = taken
                yield self._frame(self._fleet, subscriber.query)
            await news.wait()

    def _models(self) -> list[str]:
        return list(islice(self.statuses.members.models, MAX_MODELS))

    async def _show(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            begun_s = loop.time()
            try:
                fleet, decisions = await self.statuses.fleet(), decided(self.statuses.decisions)
                if self.colleagues is not None and any(one.query.admin for one in self._subscribers):
                    for there in (await self.colleagues.told(DECIDED)).values():
                        decisions += there
                    decisions = sorted(decisions, key=attrgetter("ts"), reverse=True)[:MAX_DECISIONS]
                await self.alerts.see(fleet)
                self._fleet, self._decisions = fleet, decisions
                self._frames.clear()
                self._tell()
            except Exception:  # any mistake here costs a frame; the streams go on with the next one
                log.exception("Internal error while making frames for the dashboard")
            await asyncio.sleep(max(0.0, begun_s + FRAME_S - loop.time()))

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _frame(self, fleet: Fleet, query: FeedQuery) -> bytes:
        if (made := self._frames.get(query)) is not None:
            return made
        shown, rows = select_rows(fleet, query.query)
        frame = {
            "at": fleet.at,
            "totals": fleet.totals,
            "states": fleet.states,
            "shown": shown,
            "replicas": rows if query.admin else [for_clients(one) for one in rows],
            "decisions": self._decisions if query.admin else None,
            "alerts": self.alerts.report,
            "models": self._models(),
        }
        made = self._frames[query] = event("fleet", frame)
        return made


def event(name: str, content: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(content))


def decided(decisions: deque[PastDecision]) -> list[DecisionRecord]:
    """This worker's newest decisions, without their candidates."""
    return [past.record(briefly=True) for past in islice(reversed(decisions), MAX_DECISIONS)]


def _too_many(said: str) -> ApiError:
    message = f"{said}, which is the most; close one, or try again"
    headers = {"Retry-After": str(RETRY_S)}
    return ApiError(503, message, "service_unavailable", code="too_many_watchers", headers=headers)
