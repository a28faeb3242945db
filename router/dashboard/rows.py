"""The fleet at one moment: totals, and a row for each replica, of which a page shows a selection."""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

from msgspec import Struct

from api.errors import invalid
from router.dashboard.doctor.index_rules import LAG_BATCHES
from router.dashboard.sampling import Sampling, paused, rates
from router.dashboard.status import Statuses
from router.members.counts import ReplicaCounts
from router.members.members import Member
from router.responses import ReplicaStatus

MOST_ROWS = 100
MOST_OFFSET = 1_000_000
LONGEST_FILTER = 100
INEXACT = ("partial", "syncing")
DRAINS = "it drains"  # the router's reason for a replica that reports draining
STATES = ("exact", *INEXACT, "approximate", "down", "draining")

Order: TypeAlias = Literal["asc", "desc"]


# The fields of a row that are those of the replica's status, of its load, and of its event stream; None: it has none.
OF_STATUS = ("name", "engine", "why", "state", "inexact", "breaker", "trust", "honesty", "taken_names", "role")
OF_LOAD = ("running", "waiting", "queued_tokens", "prefill_tokens_per_s")
OF_FEED = ("lag_batches", "gaps", "repairs", "restarts", "digest_mismatches", "lost_batches", "overclaim")


class Row(Struct):
    """One replica, with rates and shares of the last seconds."""

    name: str
    model: str | None
    models: int
    engine: str
    status: Literal["up", "down", "draining"]
    why: str | None
    state: str
    inexact: str | None
    severity: int
    in_flight: int
    running: int
    waiting: int
    queued_tokens: int
    prefill_tokens_per_s: float
    requests_per_s: float
    hit_predicted: float | None
    hit_reported: float | None
    ttft_p50_s: float | None
    blocks: int
    accuracy: float
    lag_batches: int | None
    faults: int
    breaker: str
    cache_used: float | None = None  # share of its blocks
    heard_age_s: float | None = None  # since its last status or event
    gaps: int | None = None
    repairs: int | None = None
    restarts: int | None = None
    digest_mismatches: int | None = None
    lost_batches: int | None = None
    overclaim: str | None = None  # why its events claim more blocks than it can hold
    trust: float = 1.0  # weight of its cached tokens
    honesty: float = 1.0  # the same, apart from what its events explain
    taken_names: dict[str, str] = {}  # names that it may not serve, each with the base model that has it
    role: str | None = None
    idle: str | None = None  # why it has nothing to do
    generated_tokens_per_s: float = 0.0
    token_s: float | None = None  # of an answer's token, on average


class Totals(Struct):
    replicas: int
    up: int
    in_flight: int
    waiting_here: int
    running: int
    waiting: int
    queued_tokens: int
    requests_per_s: float
    errors_per_s: float
    prompt_tokens_per_s: float
    hit_predicted: float | None
    hit_reported: float | None
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    blocks: int
    index_bytes: int
    saved_tokens: int = 0  # of prefill, by caches, since the router started; as of the newest point
    saved_s: float = 0.0
    generated_tokens_per_s: float = 0.0
    token_s: float | None = None


SUMS = ("in_flight", "running", "waiting", "queued_tokens", "blocks")  # of all rows


class Fleet(NamedTuple):
    at: float  # unix time
    at_s: float  # by the router's clock
    totals: Totals
    states: dict[str, int]
    rows: list[Row]
    replicas: list[ReplicaStatus]  # of the rows


class FleetView(NamedTuple):
    """Collects rows of all replicas, pausing for requests."""

    statuses: Statuses
    sampling: Sampling

    async def look(self) -> Fleet:
        statuses, members = self.statuses, self.statuses.members
        await self.sampling.others.look()
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
        sampling, health, feed = self.sampling, member.health, replica.events
        recent, over_s = sampling.recently(member), sampling.over_s()
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
            in_flight=sampling.in_flight(member),
            blocks=sum(replica.index.blocks.values()),
            accuracy=replica.index.accuracy,
            faults=member.server.faults,
            cache_used=cache_used,
            heard_age_s=None if heard_age_s is None else round(heard_age_s, 3),
            idle=None if recent.requests or sampling.in_flight(member) else replica.idle,
        ), recent

    def _totals(self, rows: list[Row], recent: ReplicaCounts) -> Totals:
        over_s = self.sampling.over_s()
        unserved = self.sampling.unserved() - self.sampling.unserved_before
        figures: dict[str, Any] = {name: sum(getattr(row, name) for row in rows) for name in SUMS}
        figures |= rates(recent, over_s, (50, 90, 99))
        return Totals(
            **figures,
            replicas=len(rows),
            up=sum(row.why is None for row in rows),
            waiting_here=self.sampling.waiting(),
            errors_per_s=round((recent.errors + unserved) / over_s, 3),
            index_bytes=self.statuses.placement.index.bytes_used(),
            saved_tokens=self.sampling.saved_tokens,
            saved_s=round(self.sampling.saved_s, 3),
        )


# ---- which rows


class Query(NamedTuple):
    """Sorting, filter and window of the rows that a page shows."""

    sort: str = "worst"
    order: Order = "desc"
    filter: str = ""
    offset: int = 0
    limit: int = MOST_ROWS


SORTS = {
    "worst": lambda row: row.severity,  # and by name: rows that are equally well keep their places
    "name": lambda row: row.name,
    "queued": lambda row: row.queued_tokens,
    "in_flight": lambda row: row.in_flight,
    "requests": lambda row: row.requests_per_s,
    "hits": lambda row: _known(row.hit_predicted),
    "ttft": lambda row: _known(row.ttft_p50_s),
    "blocks": lambda row: row.blocks,
    "accuracy": lambda row: row.accuracy,
    "lag": lambda row: _known(row.lag_batches),
}
ORDERS: dict[str, Order] = {"asc": "asc", "desc": "desc"}
SMALLEST_FIRST = ("name", "accuracy")  # unless the query names an order


def _known(value: float | None) -> float:
    return -1.0 if value is None else value


def query_of(asked: Mapping[str, str]) -> Query:
    """Parse query parameters; raise ApiError for an invalid value."""
    sort = asked.get("sort") or "worst"
    if sort not in SORTS:
        raise invalid(f"sort is {sort[:20]!r}; use one of {', '.join(SORTS)}", "sort")
    usual: Order = "asc" if sort in SMALLEST_FIRST else "desc"
    order = asked.get("order") or usual
    if order not in ORDERS:
        raise invalid(f"order is {order[:20]!r}; use asc or desc", "order")
    wanted = asked.get("filter", "")
    if len(wanted) > LONGEST_FILTER:
        raise invalid(f"filter has {len(wanted)} characters; use {LONGEST_FILTER} at most", "filter")
    return Query(
        sort,
        ORDERS[order],
        wanted.strip().lower(),
        _number(asked, "offset", 0, 0, MOST_OFFSET),
        _number(asked, "limit", MOST_ROWS, 1, MOST_ROWS),
    )


def _number(asked: Mapping[str, str], name: str, usual: int, least: int, most: int) -> int:
    text = asked.get(name) or str(usual)
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and least <= int(text) <= most):
        raise invalid(f"{name} is {text[:20]!r}; use a whole number from {least} to {most}", name)
    return int(text)


def select_rows(fleet: Fleet, query: Query) -> tuple[dict[str, Any], list[Row]]:
    """The query with the number of rows `matching` it, and those in its window."""
    rows = list(fleet.rows)
    if query.filter in STATES:
        rows = [row for row in rows if query.filter in (row.state, row.status)]
    elif query.filter:
        rows = [
            row
            for row in rows
            if any(query.filter in text for text in (row.name.lower(), (row.model or "").lower(), row.engine))
        ]
    rows.sort(key=lambda row: row.name)  # ties in order of name
    if query.sort != "name" or query.order == "desc":
        rows.sort(key=SORTS[query.sort], reverse=query.order == "desc")
    return {**query._asdict(), "matching": len(rows)}, rows[query.offset : query.offset + query.limit]
