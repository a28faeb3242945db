"""The four tables: their rows and columns, the state of a replica, and the reason of a decision in words."""

import re
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from events.tool.words import printable
from router.console.formatting import NONE, Column, ago, bar, duration, percent, rate, short
from router.console.prefixes import BRANCH, DEEPEST, holders
from router.console.top.history import Rates
from router.console.top.poller import Poller
from router.console.top.table import Table
from router.prompts.prefixes.tree import Prefix
from router.responses import DecisionRecord, ReplicaStatus

LAGGING_BATCHES = 8  # a few are always in flight
STYLES = {  # of the states, the worst first
    "down": "bold red",
    "draining": "cyan",
    "lagging": "bold yellow",
    "partial": "yellow",
    "approximate": "",
    "exact": "green",
}
STATES = tuple(STYLES)
DRAINING = ("draining", "it drains")  # by an operator, by the replica itself
BY_POLICY = {"round-robin": "its turn", "random": "at random", "least-loaded": "least loaded"}
BAD, DIM, WARM = "bold red", "dim", "dark_orange"
BAR = 4  # columns
LATE_S = 1.0  # heartbeats come four times a second

T = TypeVar("T")


# ---- rows


class Row(NamedTuple):
    """A replica with its recent rates and the counters that rose."""

    replica: ReplicaStatus
    rates: Rates | None
    risen: frozenset[str]


class Branch(NamedTuple):
    """A prefix with its ancestors in the tree."""

    prefix: Prefix
    above: tuple[Prefix, ...]
    key: str  # the prefix's id; from a router that sends none, its position


def rows_of(poller: Poller) -> list[Row]:
    history = poller.history
    rows = [Row(one, history.rates(one.name), history.risen(one.name)) for one in poller.replicas]
    return sorted(rows, key=lambda row: natural(row.replica.name))


def branches_of(poller: Poller) -> list[Branch]:
    def branches(prefixes: list[Prefix], above: tuple[Prefix, ...], key: str) -> Iterator[Branch]:
        for number, one in enumerate(prefixes):
            yield Branch(one, above, one.id or f"{key}{number}")
            yield from branches(one.below, (*above, one), f"{key}{number}.")

    return [] if poller.shared is None else list(branches(poller.shared.prefixes, (), ""))


@lru_cache(10_000)
def natural(name: str) -> list[tuple[int, str]]:
    """Sort key of a name: `demo-10` comes after `demo-9`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d{1,18})", name)]


# ---- replicas


def state_of(replica: ReplicaStatus) -> str:
    if not replica.available:
        return "draining" if replica.why in DRAINING else "down"
    if replica.state == "syncing" or (replica.events is not None and replica.events.lag_batches >= LAGGING_BATCHES):
        return "lagging"
    return replica.state if replica.state in STATES else "approximate"


def reason_of(replica: ReplicaStatus) -> str:
    """Why the replica is unavailable, its index inexact, or nothing is sent to it."""
    if not replica.available:
        return replica.why or ""
    return replica.inexact or (f"idle: {replica.idle}" if replica.idle else "")


def cached_tokens(replica: ReplicaStatus) -> int:
    """The tokens that prompts can use; of an older router, those in the blocks of all groups."""
    index = replica.index
    blocks = index.blocks if index.prompt_blocks is None else index.prompt_blocks
    return sum(blocks.values()) * (replica.block_size or 0)


def _cache(row: Row) -> float | None:
    """The cache's used share; None: its size is unknown."""
    total = row.replica.load.total_blocks
    return min(1.0, row.replica.index.blocks.get("GPU", 0) / total) if total else None


def _replica_text(row: Row) -> str:
    replica = row.replica
    return " ".join([replica.name, state_of(replica), replica.engine, replica.url, *replica.models, reason_of(replica)])


# ---- prefixes


def saved_tokens(prefix: Prefix) -> int:
    """Prompt tokens that a cache saves: all prompts but the first can reuse the prefix."""
    return prefix.tokens * (prefix.prompts - 1)


def text_of(prefix: Prefix) -> str:
    return printable(" ".join((prefix.text or "").split()))


def _tokens_text(branch: Branch) -> str:
    return f"{'' if branch.prefix.exact else '~'}{'+' if branch.above else ''}{branch.prefix.tokens:,}"


# ---- decisions


def clock(ts: float) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(ts))
    except (OverflowError, ValueError, OSError):  # a time outside the calendar
        return NONE


def tokens_or_none(tokens: int | None) -> str:
    return NONE if tokens is None else f"{tokens:,}"


def reason_for(decision: DecisionRecord) -> str:
    parts = [decision.why or ""] if decision.status >= 400 or decision.chosen is None else [_chosen(decision)]
    if decision.retries:
        parts.append(f"after {decision.retries} retr{'y' if decision.retries == 1 else 'ies'}")
    if decision.resumes:
        parts.append(f"resumed {decision.resumes} time{'s' * (decision.resumes != 1)}")
    if decision.status == 0:
        parts.append("the client left")
    elif decision.status >= 400:
        parts.append(f"status {decision.status}")
    return ", ".join(filter(None, parts))


def _chosen(decision: DecisionRecord) -> str:
    if decision.policy in BY_POLICY:
        return BY_POLICY[decision.policy]
    able = {one.name: (one.matched_tokens, one.cost_s) for one in decision.candidates if one.cost_s is not None}
    if decision.chosen not in able:  # chosen at first, and ineligible at the last decision
        return ""
    tokens, cost_s = able.pop(decision.chosen)
    if not able:
        return "the only eligible replica"
    fullest = max(able, key=lambda name: able[name][0])
    ahead, dearer_s = tokens - able[fullest][0], able[fullest][1] - cost_s
    if ahead > 0:
        return f"most cached, +{ahead:,}"
    if ahead < 0:
        return f"{fullest} has +{-ahead:,}, but costs {duration(dearer_s)} more"
    is_cheapest = all(cost_s <= other_s for _, other_s in able.values())
    return f"{'tied' if tokens else 'cold'}: {'lowest cost' if is_cheapest else 'at random'}"


def _decision_style(decision: DecisionRecord) -> str:
    return "red" if decision.status >= 400 else DIM if decision.status == 0 else ""


def _reported_style(decision: DecisionRecord) -> str:
    """Mark a hit shorter than predicted. A longer one is right, too: partial blocks are not predicted."""
    predicted, reported = decision.predicted_cached_tokens, decision.reported_cached_tokens
    return BAD if predicted is not None and reported is not None and reported < predicted else ""


# ---- kinds of columns


def _number(
    title: str,
    width: int,
    form: Callable[[Any], str],
    value: Callable[[T], float | None],
    drop_order: int = 0,
    style: Callable[[T], str] = lambda _: "",
    **how: Any,
) -> Column[T]:
    """A column of numbers: sorted largest first, unknown ones last. `how` may replace its `text`."""

    def sort(item: T) -> float:
        number = value(item)
        return -1.0 if number is None else number

    usual: dict[str, Any] = {"text": lambda item: form(value(item)), "descending": True, **how}
    return Column(title, sort=sort, width=width, drop_order=drop_order, style=style, **usual)


def _rate(title: str, width: int, form: Callable[[float | None], str], field: str, drop_order: int = 0) -> Column[Row]:
    return _number(title, width, form, lambda row: None if row.rates is None else getattr(row.rates, field), drop_order)


def _load(title: str, width: int, field: str, drop_order: int = 0) -> Column[Row]:
    def value(row: Row) -> float | None:
        number: float = getattr(row.replica.load, field)
        return number if row.replica.available or number else None

    return _number(title, width, short, value, drop_order)


def _counter(title: str, width: int, field: str, drop_order: int = 0) -> Column[Row]:
    """A figure of the event stream; a counter is red for a minute after it rose."""

    def value(row: Row) -> int | None:
        return None if row.replica.events is None else int(getattr(row.replica.events, field))

    def style(row: Row) -> str:
        return BAD if field in row.risen else DIM if (value(row) or 0) <= 0 else ""

    return _number(title, width, tokens_or_none, value, drop_order, style)


def _name(title: str, text: Callable[[T], str], style: Callable[[T], str]) -> Column[T]:
    """A column of replicas' names, in natural order."""
    shown, sort = (lambda item: printable(text(item))), (lambda item: natural(text(item)))
    return Column(title, shown, sort, 8, right=False, fit=True, cut_middle=True, style=style)


def _model(text: Callable[[T], str]) -> Column[T]:
    """Shown only if the rows are of several models."""
    return Column(
        "model", lambda item: printable(text(item)), text, 5, right=False, fit=True, drop_order=10,
        is_shown=lambda items: len(set(map(text, items))) > 1,
    )  # fmt: skip


# ---- the tables

REPLICA: Column[Row] = _name("replica", lambda row: row.replica.name, lambda row: "" if row.replica.available else DIM)
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


def replica_table() -> Table[Row]:
    def filled(share: float | None) -> str:
        return NONE if share is None else f"{bar(share, BAR)} {percent(share):>4}"

    def late(row: Row) -> str:
        return BAD if (row.replica.heard_age_s or 0.0) > LATE_S else ""

    columns: tuple[Column[Row], ...] = (
        REPLICA,
        STATE,
        _number("cache", BAR + 5, filled, _cache, style=lambda _: WARM),
        _number("tokens", 6, short, lambda row: cached_tokens(row.replica), 12),
        _rate("hits", 4, percent, "hit"),
        _load("queued", 6, "queued_tokens"),
        _load("run", 4, "running"),
        _load("wait", 4, "waiting", 4),
        _rate("req/s", 5, rate, "requests_per_s", 1),
        _rate("tokens/s", 8, rate, "generated_tokens_per_s", 1),
        _rate("each", 6, duration, "token_s", 5),
        _rate("prefill/s", 9, rate, "prefill_tokens_per_s", 3),
        _number("can/s", 5, short, lambda row: row.replica.load.prefill_tokens_per_s or None, 11),
        _number("heard", 5, ago, lambda row: row.replica.heard_age_s, 2, late),
        REASON,
    )
    return Table(columns, lambda row: row.replica.name, _replica_text)


def event_table() -> Table[Row]:
    def batches(row: Row) -> float | None:
        return None if row.replica.events is None or row.rates is None else row.rates.batches_per_s

    def last_event_s(row: Row) -> float | None:
        return None if row.replica.events is None else row.replica.events.last_event_age_s

    columns: tuple[Column[Row], ...] = (
        REPLICA,
        STATE,
        _counter("batch", 7, "seq", 6),
        _number("batch/s", 7, rate, batches, 3),
        _number("last", 5, ago, last_event_s, 2, descending=False),
        _counter("lag", 4, "lag_batches"),
        _counter("gaps", 4, "gaps"),
        _counter("lost", 4, "lost_batches"),
        _counter("repairs", 7, "repairs"),
        _counter("restarts", 8, "restarts"),
        _counter("digests", 7, "digest_mismatches"),
        _counter("reconnects", 10, "reconnects", 7),
        _number("accuracy", 8, "{:.1%}".format, lambda row: row.replica.index.accuracy, 5, descending=False),
        REASON,
    )
    return Table(columns, lambda row: row.replica.name, _replica_text)


def prefix_table() -> Table[Branch]:
    """Hot prefixes, the largest saving first; unsorted they are a tree."""

    def tree(branch: Branch) -> str:
        return f"{BRANCH * min(len(branch.above), DEEPEST)}{_tokens_text(branch)}"

    def dim(branch: Branch) -> str:
        return "" if branch.prefix.held_by else DIM

    names: dict[str, Any] = {"right": False, "fit": True}
    tokens = {**names, "text": tree, "sorted_text": _tokens_text}
    table: Table[Branch] = Table(
        (
            _number("prefix tokens", 13, str, lambda branch: branch.prefix.tokens, style=dim, **tokens),
            _number("prompts", 7, tokens_or_none, lambda branch: branch.prefix.prompts),
            _number("saves", 5, short, lambda branch: saved_tokens(branch.prefix), 3),
            _number("last", 5, ago, lambda branch: branch.prefix.idle_s, 1, descending=False),
            _number(
                "held by", 8, str, lambda one: one.prefix.held_by, 2, text=lambda one: holders(one.prefix), **names
            ),
            _model(lambda branch: branch.prefix.model),
            Column("text", lambda branch: text_of(branch.prefix), lambda branch: branch.prefix.text or "", right=False),
        ),
        lambda branch: branch.key,
        lambda branch: " ".join([branch.prefix.model, branch.prefix.text or "", *branch.prefix.replicas]),
    )
    table.sort_by([column.title for column in table.columns].index("saves"))
    return table


def decision_table() -> Table[DecisionRecord]:
    def tokens(one: DecisionRecord) -> str:
        return f"{'' if one.exact else '~'}{one.prompt_tokens:,}"

    def found(one: DecisionRecord) -> str:
        return " ".join([one.chosen or "nobody", one.model, one.request_id, reason_for(one), f"status {one.status}"])

    columns: tuple[Column[DecisionRecord], ...] = (
        _number("decided", 8, clock, lambda one: one.ts, right=False),
        _name("chosen", lambda one: one.chosen or "nobody", _decision_style),
        _model(lambda one: one.model),
        _number("tokens", 7, str, lambda one: one.prompt_tokens, text=tokens),
        _number("predicted", 9, tokens_or_none, lambda one: one.predicted_cached_tokens, 2),
        _number("reported", 8, tokens_or_none, lambda one: one.reported_cached_tokens, 1, _reported_style),
        _number("estimate", 8, duration, lambda one: one.estimated_ttft_s, 11),
        _number("TTFT", 7, duration, lambda one: one.ttft_s, 3),
        Column("why", reason_for, reason_for, right=False, style=_decision_style),
    )
    return Table(columns, lambda one: f"{one.request_id} {one.ts}", found)
