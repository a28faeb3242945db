"""The fleet at one moment: totals, and a row for each replica, of which a page shows a selection."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

from msgspec import Struct

from api.errors import invalid
from router.responses import ReplicaStatus

MAX_ROWS = 100
MAX_OFFSET = 1_000_000
LONGEST_FILTER = 100
INEXACT = ("partial", "syncing")
STATES = ("exact", *INEXACT, "approximate", "down", "draining")

Order: TypeAlias = Literal["asc", "desc"]


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
    trust: float = 1.0  # weight of its cached tokens
    honesty: float = 1.0  # the same, apart from what its events explain
    taken_names: dict[str, str] = {}  # names that it may not serve, each with the base model that has it
    role: str | None = None
    idle: str | None = None  # why it has nothing to do
    generated_tokens_per_s: float = 0.0
    token_s: float | None = None  # the mean time of an answer's token


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
    saved_tokens: int = 0  # prefill saved by caches since the router started, up to the newest point
    saved_s: float = 0.0
    generated_tokens_per_s: float = 0.0
    token_s: float | None = None


class Fleet(NamedTuple):
    at: float  # unix time
    at_s: float  # the router's time
    totals: Totals
    states: dict[str, int]
    rows: list[Row]
    replicas: list[ReplicaStatus]  # the replicas of the rows


# ---- which rows


class Query(NamedTuple):
    """Sorting, filter and window of the rows that a page shows."""

    sort: str = "worst"
    order: Order = "desc"
    filter: str = ""
    offset: int = 0
    limit: int = MAX_ROWS


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
        _number(asked, "offset", 0, 0, MAX_OFFSET),
        _number(asked, "limit", MAX_ROWS, 1, MAX_ROWS),
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
