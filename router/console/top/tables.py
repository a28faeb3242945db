"""The rows of the tables and their columns, the state of a replica, and the reason of a decision in words."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from engines import profile_of
from events.tool.words import printable
from router.console.formatting import NONE, Column, ago, bar, count_of, duration, natural, percent, rate, short
from router.console.table import Table
from router.prompts.prefixes.tree import Prefix
from router.responses import STANDINGS, DecisionRecord, FeedState, ReplicaStatus

STYLES = {
    "down": "bold red",
    "draining": "cyan",
    "syncing": "bold yellow",
    "lagging": "bold yellow",
    "partial": "yellow",
    "exact": "green",
}
COUNTERS = ("gaps", "lost_batches", "repairs", "restarts", "digest_mismatches", "reconnects")  # event streams' counters
BRANCH, DEEPEST = "  ", 8  # levels that are indented: a long conversation has one for each of its turns
NAMED = 3  # replicas; of more the number is said
BY_POLICY = {"round-robin": "its turn", "random": "at random", "least-loaded": "least loaded"}
BAD, DIM, WARM = "bold red", "dim", "dark_orange"
BAR = 4  # columns
LATE_S = 1.0  # heartbeats come four times a second

T = TypeVar("T")


class Row(NamedTuple, Generic[T]):
    """A replica, a prefix or a decision, with what is known beside it."""

    key: str  # the cursor follows it
    of: T
    risen: frozenset[str] = frozenset()  # counters of a replica's event stream
    above: tuple[T, ...] = ()  # the prefixes above one in the tree


def at(path: str) -> Callable[[Row[Any]], Any]:
    """Return a function that follows attributes; None where one on the way is None."""

    def value(part: Any) -> Any:
        for name in path.split("."):
            part = getattr(part, name, None)
        return part

    return value


KEY: Callable[[Row[Any]], str] = at("key")
number = partial(Column, descending=True)
name = partial(Column, form=printable, width=8, right=False, fit=True, cut_middle=True)
words = partial(Column, form=printable, right=False)


# ---- replicas


def replica_rows(replicas: Sequence[ReplicaStatus], before: Mapping[str, FeedState | None]) -> list[Row[ReplicaStatus]]:
    """`before`: the event streams some seconds ago."""

    def risen(one: ReplicaStatus) -> frozenset[str]:
        then = before.get(one.name)
        if one.events is None or then is None:
            return frozenset()
        return frozenset(name for name in COUNTERS if getattr(one.events, name) > getattr(then, name))

    return sorted((Row(one.name, one, risen(one)) for one in replicas), key=lambda row: natural(row.key))


def state_of(replica: ReplicaStatus) -> str:
    """Its standing; an older router tells only the state of its index."""
    standing = replica.standing or (replica.state if replica.available else "down")
    return standing if standing in STANDINGS else "approximate"


def reason_of(replica: ReplicaStatus) -> str:
    """Why the replica is unavailable, its index inexact, or nothing is sent to it."""
    if not replica.available:
        return replica.why or ""
    return replica.inexact or (f"idle: {replica.idle}" if replica.idle else "")


def cached_tokens(replica: ReplicaStatus) -> int:
    """The tokens that prompts can use; of an older router, those in the blocks of all groups."""
    of_all, usable = replica.index.blocks, replica.index.prompt_blocks
    return sum((of_all if usable is None else usable).values()) * (replica.block_size or 0)


def filled(share: float | None) -> str:
    return NONE if share is None else f"{bar(share, BAR)} {percent(share):>4}"


def prefilled_per_s(replica: ReplicaStatus) -> float | None:
    """The prompt tokens that were predicted not to be cached."""
    recent = replica.recent
    return None if recent is None else recent.prompt_tokens_per_s * (1 - (recent.hit_predicted or 0.0))


def heard_style(row: Row[ReplicaStatus]) -> str:
    return BAD if profile_of(row.of.engine).publishes_status and (row.of.heard_age_s or 0.0) > LATE_S else ""


def counter(title: str, width: int, field: str, drop_order: int = 0) -> Column[Row[ReplicaStatus]]:
    """A figure of the event stream; a counter is red for some seconds after it rose."""
    value = at(f"of.events.{field}")

    def style(row: Row[ReplicaStatus]) -> str:
        return BAD if field in row.risen else DIM if (value(row) or 0) <= 0 else ""

    return number(title, value, count_of, width, drop_order, style)


FIGURES: tuple[Column[Row[ReplicaStatus]], ...] = (
    number("cache", at("of.cache_used"), filled, BAR + 5, style=lambda _: WARM),
    number("tokens", lambda row: cached_tokens(row.of), short, 6, 12),
    number("hits", at("of.recent.hit_predicted"), percent, 4),
    number("queued", at("of.load.queued_tokens"), short, 6),
    number("run", at("of.load.running"), short, 4),
    number("wait", at("of.load.waiting"), short, 4, 4),
    number("req/s", at("of.recent.requests_per_s"), rate, 5, 1),
    number("tokens/s", at("of.recent.generated_tokens_per_s"), rate, 8, 1),
    number("each", at("of.recent.token_s"), duration, 6, 5),
    number("prefill/s", lambda row: prefilled_per_s(row.of), rate, 9, 3),
    number("can/s", lambda row: row.of.load.prefill_tokens_per_s or None, short, 5, 11),
    number("heard", at("of.heard_age_s"), ago, 5, 2, heard_style),
)
STREAMS: tuple[Column[Row[ReplicaStatus]], ...] = (
    counter("batch", 7, "seq", 6),
    number("batch/s", lambda row: row.of.events and at("of.recent.batches_per_s")(row), rate, 7, 3),
    Column("last", at("of.events.last_event_age_s"), ago, 5, 2),
    counter("lag", 4, "lag_batches"),
    counter("gaps", 4, "gaps"),
    counter("lost", 4, "lost_batches"),
    counter("repairs", 7, "repairs"),
    counter("restarts", 8, "restarts"),
    counter("digests", 7, "digest_mismatches"),
    counter("reconnects", 10, "reconnects", 7),
    Column("accuracy", at("of.index.accuracy"), "{:.1%}".format, 8, 5),
)


def replica_table(columns: Sequence[Column[Row[ReplicaStatus]]]) -> Table[Row[ReplicaStatus]]:
    def found(row: Row[ReplicaStatus]) -> str:
        one = row.of
        return " ".join([one.name, state_of(one), one.engine, one.url, *one.models, reason_of(one)])

    def place(row: Row[ReplicaStatus]) -> int:
        return STANDINGS.index(state_of(row.of))

    def has_reasons(rows: Sequence[Row[ReplicaStatus]]) -> bool:
        return any(reason_of(row.of) for row in rows)

    def style(row: Row[ReplicaStatus]) -> str:
        return STYLES.get(state_of(row.of), "")

    all_columns: tuple[Column[Row[ReplicaStatus]], ...] = (
        name("replica", lambda row: row.of.name, style=lambda row: "" if row.of.available else DIM),
        Column("state", place, STANDINGS.__getitem__, 9, style=style, right=False, fit=True),
        *columns,
        words("why", lambda row: reason_of(row.of), drop_order=20, is_shown=has_reasons),
    )
    return Table(all_columns, KEY, found)


# ---- prefixes


def prefix_rows(prefixes: Sequence[Prefix]) -> list[Row[Prefix]]:
    """The prefixes of a tree. Their keys are their ids; from a router that sends none, their positions."""

    def rows(prefixes: Sequence[Prefix], above: tuple[Prefix, ...], key: str) -> Iterator[Row[Prefix]]:
        for place, one in enumerate(prefixes):
            yield Row(one.id or f"{key}{place}", one, above=above)
            yield from rows(one.below, (*above, one), f"{key}{place}.")

    return list(rows(prefixes, (), ""))


def holders(prefix: Prefix) -> str:
    """The replicas that hold it, and for how long they give it up last."""
    if not prefix.held_by:
        return "nobody"
    named = ", ".join(printable(prefix.named(name)) for name in prefix.replicas[:NAMED])
    more = prefix.held_by - min(NAMED, len(prefix.replicas))
    kept = "" if prefix.retained_s is None else f", kept {ago(prefix.retained_s)}"
    return named + (f" and {more:,} more" if more else "") + kept


def text_of(prefix: Prefix) -> str:
    return printable(" ".join((prefix.text or "").split()))


def saved_tokens(prefix: Prefix) -> int:
    """Prompt tokens that a cache saves: all prompts but the first can reuse the prefix."""
    return prefix.tokens * (prefix.prompts - 1)


MODEL: Column[Row[Any]] = words(
    "model",
    at("of.model"),
    width=5,
    fit=True,
    drop_order=10,
    is_shown=lambda rows: len({row.of.model for row in rows}) > 1,
)


def prefix_table(sorted_by: str = "saves") -> Table[Row[Prefix]]:
    """Hot prefixes, the largest saving first; unsorted they are a tree."""
    tokens: Column[Row[Prefix]] = number(
        "prefix tokens",
        at("of.tokens"),
        count_of,
        13,
        right=False,
        fit=True,
        mark=lambda row: f"{'' if row.of.exact else '~'}{'+' if row.above else ''}",
        indent=lambda row: len(BRANCH) * min(len(row.above), DEEPEST),
        style=lambda row: "" if row.of.held_by else DIM,
    )
    columns: tuple[Column[Row[Prefix]], ...] = (
        tokens,
        number("prompts", at("of.prompts"), count_of, 7),
        number("saves", lambda row: saved_tokens(row.of), short, 5, 3),
        Column("last", at("of.idle_s"), ago, 5, 1),
        words("held by", lambda row: holders(row.of), width=8, drop_order=2, fit=True),
        MODEL,
        words("text", lambda row: text_of(row.of), is_shown=lambda rows: any(row.of.text for row in rows)),
    )
    return Table(columns, KEY, lambda row: " ".join([row.of.model, row.of.text or "", *row.of.replicas]), sorted_by)


# ---- decisions


def clock(ts: float) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(ts))
    except (OverflowError, ValueError, OSError):  # a time outside the calendar
        return NONE


def reason_for(decision: DecisionRecord) -> str:
    parts = [decision.why or ""] if decision.status >= 400 or decision.chosen is None else [why_chosen(decision)]
    if decision.retries:
        parts.append(f"after {decision.retries} retr{'y' if decision.retries == 1 else 'ies'}")
    if decision.resumes:
        parts.append(f"resumed {decision.resumes} time{'s' * (decision.resumes != 1)}")
    if decision.status == 0:
        parts.append("the client left")
    elif decision.status >= 400:
        parts.append(f"status {decision.status}")
    return ", ".join(filter(None, parts))


def why_chosen(decision: DecisionRecord) -> str:
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


def decision_table() -> Table[Row[DecisionRecord]]:
    def style(row: Row[DecisionRecord]) -> str:
        return "red" if row.of.status >= 400 else DIM if row.of.status == 0 else ""

    def short_of(row: Row[DecisionRecord]) -> str:
        """Mark a hit shorter than predicted. A longer one is right, too: partial blocks are not predicted."""
        predicted, reported = row.of.predicted_cached_tokens, row.of.reported_cached_tokens
        return BAD if predicted is not None and reported is not None and reported < predicted else ""

    def found(row: Row[DecisionRecord]) -> str:
        one = row.of
        return " ".join([one.chosen or "nobody", one.model, one.request_id, reason_for(one), f"status {one.status}"])

    columns: tuple[Column[Row[DecisionRecord]], ...] = (
        number("decided", at("of.ts"), clock, 8, right=False),
        name("chosen", lambda row: row.of.chosen or "nobody", style=style),
        MODEL,
        number("tokens", at("of.prompt_tokens"), count_of, 7, mark=lambda row: "" if row.of.exact else "~"),
        number("predicted", at("of.predicted_cached_tokens"), count_of, 9, 2),
        number("reported", at("of.reported_cached_tokens"), count_of, 8, 1, short_of),
        number("estimate", at("of.estimated_ttft_s"), duration, 8, 11),
        number("TTFT", at("of.ttft_s"), duration, 7, 3),
        words("why", lambda row: reason_for(row.of), style=style),
    )
    return Table(columns, KEY, found)
