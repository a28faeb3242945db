"""Sends frames to open dashboards: one per second and query, made only while a dashboard is open.

A slow subscriber gets the newest frame when it is ready for one; frames in between are dropped.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec

from api.errors import ApiError, draining
from router.config import RouterConfig
from router.dashboard.alerts import Alerts
from router.dashboard.rows import Fleet, Query, select_rows
from router.dashboard.sampling import EVERY_S
from router.dashboard.status import Statuses, for_clients
from router.lifecycle import Lifecycle
from router.proxy.request_summary import PastDecision
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
SHOWN = (  # fields of a decision's record
    *("request_id", "model", "chosen", "prompt_tokens", "exact", "index_exact", "prediction_exact", "why_inexact"),
    *("predicted_cached_tokens", "reported_cached_tokens", "ttft_s", "duration_s", "status", "retries", "resumes"),
    "why",
)


class FeedQuery(NamedTuple):
    """Everything that a frame depends on."""

    query: Query
    admin: bool


class Subscriber:
    """One open dashboard."""

    def __init__(self, query: FeedQuery, key: Key | None = None, address: str = "") -> None:
        self.query = query
        self.key = key
        self.whose = address if key is None else key.digest
        self.ends: str | None = None  # reason
        self._newest: bytes | None = None
        self._ready = asyncio.Event()

    def show(self, frame: bytes) -> None:
        self._newest = frame
        self._ready.set()

    def end(self, why: str) -> None:
        self.ends = why
        self._ready.set()

    async def frame(self) -> bytes | None:
        """Wait for a new frame; None at the end of the stream."""
        await self._ready.wait()
        if self.ends is not None:
            return None
        self._ready.clear()
        frame, self._newest = self._newest, None
        return frame


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
    _fleet: Fleet | None = None
    _decisions: Sequence[dict[str, Any]] = ()
    _showing: asyncio.Task[None] | None = None
    _forgetting: asyncio.TimerHandle | None = None
    _closed: bool = False

    def __len__(self) -> int:
        return len(self._subscribers)

    def join(self, query: FeedQuery, key: Key | None = None, address: str = "") -> Subscriber:
        """Add a subscriber, to be removed with `leave`. Raises ApiError if there are too many or the router ends."""
        if self._closed or self.lifecycle.draining:
            raise draining()
        subscriber = Subscriber(query, key, address)
        readers = [one for one in self._subscribers if not one.query.admin]
        if len(self._subscribers) >= MAX_WATCHERS:
            raise _too_many(f"{MAX_WATCHERS} dashboards are open")
        if not query.admin and len(readers) >= MAX_READERS:
            raise _too_many(f"{MAX_READERS} dashboards of readers are open")
        if not query.admin and sum(one.whose == subscriber.whose for one in readers) >= MAX_OF_ONE:
            raise _too_many(f"{MAX_OF_ONE} dashboards of one reader are open")
        if self._fleet is not None:
            subscriber.show(self._frame(self._fleet, query))
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
        for subscriber in self._subscribers:
            subscriber.end("the router ends")

    # ---- frames

    async def frames(self, subscriber: Subscriber) -> AsyncIterator[bytes]:
        yield event("hello", self._hello(subscriber.query.admin))
        seen = -1
        while (frame := await subscriber.frame()) is not None:
            if (taken := self.statuses.sampling.taken) != seen:
                yield self._history(seen)
                seen = taken
            yield frame
        yield event("end", {"why": subscriber.ends})

    def _hello(self, admin: bool) -> dict[str, Any]:
        config = self.config
        return {
            "version": version("warmroute"),
            "role": "admin" if admin else "reader",
            "keyed": config.demand_key,
            "shows_prompts": config.shows_texts,
            "policy": config.policy,
            "models": self._models(),
            "started": self.lifecycle.started,
            "interval_s": FRAME_S,
            "history_interval_s": EVERY_S,
            "price_per_million_tokens": config.price_per_million_tokens,
        }

    def _models(self) -> list[str]:
        return list(islice(self.statuses.members.models, MAX_MODELS))

    def _history(self, seen: int) -> bytes:
        """The newest point, or all points if the subscriber missed some."""
        sampling = self.statuses.sampling
        columns = sampling.fleet.columns()
        if seen >= 0 and sampling.taken == seen + 1:
            return event("point", {name: column[-1] for name, column in columns.items()})
        return event("history", {"interval_s": EVERY_S, **columns})

    async def _show(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            begun_s = loop.time()
            try:
                await self._show_all()
            except Exception:  # any mistake here costs a frame; the streams go on with the next one
                log.exception("Internal error while making frames for the dashboard")
            await asyncio.sleep(max(0.0, begun_s + FRAME_S - loop.time()))

    async def _show_all(self) -> None:
        for subscriber in self._subscribers:
            if not self.admission.knows(subscriber.key, admin=subscriber.query.admin):
                subscriber.end("its API key is not valid any more")
        fleet = self._fleet = await self.statuses.fleet()
        self._decisions = await self._decided()
        await asyncio.sleep(0)
        await self.alerts.see(fleet)
        await asyncio.sleep(0)
        for query in {subscriber.query for subscriber in self._subscribers}:
            frame = self._frame(fleet, query)
            for subscriber in self._subscribers:
                if subscriber.query == query:
                    subscriber.show(frame)
            await asyncio.sleep(0)

    async def _decided(self) -> list[dict[str, Any]]:
        """The newest decisions of all workers."""
        newest = decided(self.statuses.decisions)
        if self.colleagues is not None and any(subscriber.query.admin for subscriber in self._subscribers):
            for there in (await self.colleagues.told(DECIDED)).values():
                newest += there
            newest = sorted(newest, key=itemgetter("at"), reverse=True)[:MAX_DECISIONS]
        return newest

    def _frame(self, fleet: Fleet, query: FeedQuery) -> bytes:
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
        return event("fleet", frame)


def event(name: str, content: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(content))


def decided(decisions: deque[PastDecision]) -> list[dict[str, Any]]:
    """This worker's newest decisions."""
    shown = []
    for past in islice(reversed(decisions), MAX_DECISIONS):
        record = past.record(briefly=True)
        is_split = record.prefill is not None and record.prefill.outcome is not None
        fields = {name: getattr(record, name) for name in SHOWN}
        shown.append({"at": round(record.ts, 3), **fields, "prefill": record.prefill if is_split else None})
    return shown


def _too_many(said: str) -> ApiError:
    message = f"{said}, which is the most; close one, or try again"
    headers = {"Retry-After": str(RETRY_S)}
    return ApiError(503, message, "service_unavailable", code="too_many_watchers", headers=headers)
