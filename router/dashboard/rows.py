"""The fleet at one moment: totals, and its replicas, of which a page shows a selection."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

from msgspec import field

from api.errors import invalid
from router.responses import STANDINGS, Rates, ReplicaStatus

MAX_ROWS = 100
LONGEST_FILTER = 100

Order: TypeAlias = Literal["asc", "desc"]


class Totals(Rates, frozen=True, kw_only=True):
    replicas: int
    up: int
    in_flight: int
    waiting_here: int
    running: int
    waiting: int
    queued_tokens: int
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    blocks: int
    index_bytes: int
    saved_tokens: int = 0  # prefill saved by caches since the router started, up to the newest point
    saved_s: float = 0.0
    computed: dict[str, int] = field(default_factory=dict)  # prompt tokens by cause, of the same time as `saved_tokens`


class Fleet(NamedTuple):
    at: float  # unix time
    at_s: float  # the router's time
    totals: Totals
    states: dict[str, int]  # replicas by their standing
    replicas: list[ReplicaStatus]


# ---- which rows


class Query(NamedTuple):
    """Sorting and filter of the replicas that a page shows."""

    sort: str = "worst"
    order: Order = "desc"
    filter: str = ""


SORTS: dict[str, Callable[[ReplicaStatus], Any]] = {
    "worst": lambda one: one.severity,  # and by name: rows that are equally well keep their places
    "name": lambda one: one.name,
    "queued": lambda one: one.load.queued_tokens,
    "in_flight": lambda one: one.load.in_flight,
    "requests": lambda one: _recent(one, "requests_per_s"),
    "hits": lambda one: _recent(one, "hit_predicted"),
    "ttft": lambda one: _recent(one, "ttft_p50_s"),
    "blocks": lambda one: sum(one.index.blocks.values()),
    "accuracy": lambda one: one.index.accuracy,
    "lag": lambda one: -1 if one.events is None else one.events.lag_batches,
}
ORDERS: dict[str, Order] = {"asc": "asc", "desc": "desc"}
SMALLEST_FIRST = ("name", "accuracy")  # unless the query names an order


def _recent(replica: ReplicaStatus, name: str) -> float:
    value = getattr(replica.recent, name, None)
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
    return Query(sort, ORDERS[order], wanted.strip().lower())


def select_rows(fleet: Fleet, query: Query) -> tuple[dict[str, Any], list[ReplicaStatus]]:
    """The query with the number of replicas `matching` it, and the first of them."""

    def is_meant(one: ReplicaStatus) -> bool:
        if query.filter in STANDINGS:
            return query.filter == one.standing
        return any(query.filter in text.lower() for text in (one.name, one.engine, *one.models))

    rows = sorted((one for one in fleet.replicas if is_meant(one)), key=SORTS["name"])  # ties in order of name
    if query.sort != "name" or query.order == "desc":
        rows.sort(key=SORTS[query.sort], reverse=query.order == "desc")
    return {**query._asdict(), "matching": len(rows)}, rows[:MAX_ROWS]
