"""The four tables and their columns."""

from collections.abc import Callable
from typing import Any, TypeVar

from events.tool.words import printable
from router.console.formatting import Column, ago, bar, duration, percent, rate, short
from router.console.prefixes import BRANCH, DEEPEST, holders
from router.responses import DecisionRecord
from router.top.rows import (
    STATES,
    STYLES,
    Branch,
    Row,
    cache_use,
    cached_tokens,
    clock,
    is_mispredicted,
    natural,
    reason_for,
    reason_of,
    saved_tokens,
    state_of,
    text_of,
    tokens_or_none,
)
from router.top.table import Table

BAD = "bold red"
DIM = "dim"
BAR = 4  # columns
WARM = "dark_orange"
LATE_S = 1.0  # heartbeats come four times a second

T = TypeVar("T")


def _number(
    title: str, value: Callable[[T], float | None], form: Callable[[Any], str], width: int, **how: Any
) -> Column[T]:
    """A column of numbers: sorted largest first, unknown ones last. `how` may replace its `text`."""

    def text(item: T) -> str:
        return form(value(item))

    def sort(item: T) -> float:
        number = value(item)
        return -1.0 if number is None else number

    fields: dict[str, Any] = {"text": text, "sort": sort, "width": width, "descending": True, **how}
    return Column(title, **fields)


def _rate(title: str, form: Callable[[float | None], str], field: str, width: int, drop_order: int = 0) -> Column[Row]:
    return _number(
        title, lambda row: None if row.rates is None else getattr(row.rates, field), form, width, drop_order=drop_order
    )


def _name(title: str, text: Callable[[T], str], **how: Any) -> Column[T]:
    """A column of replicas' names, in natural order."""
    return Column(
        title, lambda item: printable(text(item)), lambda item: natural(text(item)), 8, right=False, fit=True,
        cut_middle=True, **how,
    )  # fmt: skip


def _model(text: Callable[[T], str]) -> Column[T]:
    """Shown only if the rows are of several models."""
    return Column(
        "model", lambda item: printable(text(item)), text, 5, right=False, fit=True, drop_order=10,
        is_shown=lambda items: len(set(map(text, items))) > 1,
    )  # fmt: skip


NAME: Column[Row] = _name(
    "replica", lambda row: row.replica.name, style=lambda row: "" if row.replica.available else DIM
)
STATE: Column[Row] = Column(
    "state",
    lambda row: state_of(row.replica),
    lambda row: STATES.index(state_of(row.replica)),
    9,
    right=False,
    fit=True,
    style=lambda row: STYLES[state_of(row.replica)],
)
REASON: Column[Row] = Column(
    "why",
    lambda row: printable(reason_of(row.replica)),
    lambda row: reason_of(row.replica),
    right=False,
    drop_order=20,
    is_shown=lambda rows: any(reason_of(row.replica) for row in rows),
)


def _load(title: str, field: str, width: int, drop_order: int = 0) -> Column[Row]:
    def value(row: Row) -> float | None:
        number: float = getattr(row.replica.load, field)
        return number if row.replica.available or number else None

    return _number(title, value, short, width, drop_order=drop_order)


def _filled(share: float | None) -> str:
    return percent(share) if share is None else f"{bar(share, BAR)} {percent(share):>4}"


LOAD_COLUMNS: tuple[Column[Row], ...] = (
    NAME,
    STATE,
    _number("cache", lambda row: cache_use(row.replica), _filled, 4 + 1 + BAR, style=lambda _: WARM),
    _number("tokens", lambda row: cached_tokens(row.replica), short, 6, drop_order=12),
    _rate("hits", percent, "hit", 4),
    _load("queued", "queued_tokens", 6),
    _load("run", "running", 4),
    _load("wait", "waiting", 4, drop_order=4),
    _rate("req/s", rate, "requests_per_s", 5, drop_order=1),
    _rate("tokens/s", rate, "generated_tokens_per_s", 8, drop_order=1),
    _rate("each", duration, "token_s", 6, drop_order=5),
    _rate("prefill/s", rate, "prefill_tokens_per_s", 9, drop_order=3),
    _number("can/s", lambda row: row.replica.load.prefill_tokens_per_s or None, short, 5, drop_order=11),
    _number(
        "heard",
        lambda row: row.replica.heard_age_s,
        ago,
        5,
        drop_order=2,
        style=lambda row: BAD if (row.replica.heard_age_s or 0.0) > LATE_S else "",
    ),
    REASON,
)


def _counter(title: str, field: str, width: int, drop_order: int = 0) -> Column[Row]:
    """A counter of the event stream, red for a minute after it rose."""

    def value(row: Row) -> int | None:
        return None if row.replica.events is None else int(getattr(row.replica.events, field))

    return _number(
        title,
        value,
        tokens_or_none,
        width,
        drop_order=drop_order,
        style=lambda row: BAD if field in row.risen else DIM if (value(row) or 0) <= 0 else "",
    )


def _last_event_s(row: Row) -> float | None:
    return None if row.replica.events is None else row.replica.events.last_event_age_s


EVENT_COLUMNS: tuple[Column[Row], ...] = (
    NAME,
    STATE,
    _counter("batch", "seq", 7, drop_order=6),
    _number(
        "batch/s",
        lambda row: None if row.replica.events is None or row.rates is None else row.rates.batches_per_s,
        rate,
        7,
        drop_order=3,
    ),
    _number("last", _last_event_s, ago, 5, drop_order=2, descending=False),
    _counter("lag", "lag_batches", 4),
    _counter("gaps", "gaps", 4),
    _counter("lost", "lost_batches", 4),
    _counter("repairs", "repairs", 7),
    _counter("restarts", "restarts", 8),
    _counter("digests", "digest_mismatches", 7),
    _counter("reconnects", "reconnects", 10, drop_order=7),
    _number("accuracy", lambda row: row.replica.index.accuracy, "{:.1%}".format, 8, drop_order=5, descending=False),
    REASON,
)


def _tokens_text(branch: Branch) -> str:
    return f"{'' if branch.prefix.exact else '~'}{'+' if branch.above else ''}{branch.prefix.tokens:,}"


def _tree_text(branch: Branch) -> str:
    return f"{BRANCH * min(len(branch.above), DEEPEST)}{_tokens_text(branch)}"


PREFIX_COLUMNS: tuple[Column[Branch], ...] = (
    _number(
        "prefix tokens",
        lambda branch: branch.prefix.tokens,
        str,
        13,
        text=_tree_text,
        right=False,
        fit=True,
        sorted_text=_tokens_text,
        style=lambda branch: "" if branch.prefix.held_by else DIM,
    ),
    _number("prompts", lambda branch: branch.prefix.prompts, tokens_or_none, 7),
    _number("saves", lambda branch: saved_tokens(branch.prefix), short, 5, drop_order=3),
    _number("last", lambda branch: branch.prefix.idle_s, ago, 5, drop_order=1, descending=False),
    _number(
        "held by",
        lambda branch: branch.prefix.held_by,
        str,
        8,
        text=lambda branch: holders(branch.prefix),
        right=False,
        fit=True,
        drop_order=2,
    ),
    _model(lambda branch: branch.prefix.model),
    Column("text", lambda branch: text_of(branch.prefix), lambda branch: branch.prefix.text or "", right=False),
)


def _decision_style(decision: DecisionRecord) -> str:
    return "red" if decision.status >= 400 else DIM if decision.status == 0 else ""


DECISION_COLUMNS: tuple[Column[DecisionRecord], ...] = (
    _number("decided", lambda one: one.ts, clock, 8, right=False),
    _name("chosen", lambda one: one.chosen or "nobody", style=_decision_style),
    _model(lambda one: one.model),
    _number(
        "tokens",
        lambda one: one.prompt_tokens,
        str,
        7,
        text=lambda one: f"{'' if one.exact else '~'}{one.prompt_tokens:,}",
    ),
    _number("predicted", lambda one: one.predicted_cached_tokens, tokens_or_none, 9, drop_order=2),
    _number(
        "reported",
        lambda one: one.reported_cached_tokens,
        tokens_or_none,
        8,
        drop_order=1,
        style=lambda one: BAD if is_mispredicted(one) else "",
    ),
    _number("estimate", lambda one: one.estimated_ttft_s, duration, 8, drop_order=11),
    _number("TTFT", lambda one: one.ttft_s, duration, 7, drop_order=3),
    Column("why", reason_for, reason_for, right=False, style=_decision_style),
)


# ---- tables


def replica_table() -> Table[Row]:
    return Table(LOAD_COLUMNS, lambda row: row.replica.name, _replica_text)


def event_table() -> Table[Row]:
    return Table(EVENT_COLUMNS, lambda row: row.replica.name, _replica_text)


def prefix_table() -> Table[Branch]:
    """Hot prefixes, the largest saving first; unsorted they are a tree."""
    table = Table(
        PREFIX_COLUMNS,
        lambda branch: branch.key,
        lambda branch: " ".join([branch.prefix.model, branch.prefix.text or "", *branch.prefix.replicas]),
    )
    table.sort_by([column.title for column in PREFIX_COLUMNS].index("saves"))
    return table


def decision_table() -> Table[DecisionRecord]:
    return Table(
        DECISION_COLUMNS,
        lambda one: f"{one.request_id} {one.ts}",
        lambda one: " ".join(
            [one.chosen or "nobody", one.model, one.request_id, reason_for(one), f"status {one.status}"]
        ),
    )


def _replica_text(row: Row) -> str:
    replica = row.replica
    return " ".join([replica.name, state_of(replica), replica.engine, replica.url, *replica.models, reason_of(replica)])
