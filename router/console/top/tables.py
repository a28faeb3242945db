"""The columns of the tables, the state of a replica and the reason of a decision in words, and details of both."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import msgspec

from engines import profile_of
from events.tool.words import printable
from router.console.explain import told_portions
from router.console.formatting import NONE, Column, ago, bar, count_of, duration, percent, rate, short
from router.console.table import Line, Table
from router.responses import STANDINGS, DecisionRecord, ReplicaStatus, SessionRow

Row: TypeAlias = ReplicaStatus | DecisionRecord | SessionRow

STYLES = {
    "down": "bold red",
    "draining": "cyan",
    "syncing": "bold yellow",
    "lagging": "bold yellow",
    "partial": "yellow",
    "exact": "green",
}
BY_POLICY = {"round-robin": "its turn", "random": "at random", "least-loaded": "least loaded"}
BAD, DIM, WARM = "bold red", "dim", "dark_orange"
BAR = 4  # columns
LABEL = 26  # columns of a field's name
LATE_S = 1.0  # heartbeats come four times a second


def at(path: str) -> Callable[[Any], Any]:
    """Return a function that follows attributes; None where one on the way is None."""

    def value(part: Any) -> Any:
        for name in path.split("."):
            part = getattr(part, name, None)
        return part

    return value


number = partial(Column, descending=True)
name = partial(Column, form=printable, width=8, right=False, fit=True, cut_middle=True)
words = partial(Column, form=printable, right=False)


# ---- replicas


def state_of(replica: ReplicaStatus) -> str:
    return replica.standing if replica.standing in STANDINGS else "approximate"


def reason_of(replica: ReplicaStatus) -> str:
    """Why the replica is unavailable, its index inexact, or nothing is sent to it."""
    if not replica.available:
        return replica.why or ""
    return replica.inexact or (f"idle: {replica.idle}" if replica.idle else "")


def cached_tokens(replica: ReplicaStatus) -> int:
    """The tokens that prompts can use."""
    return sum((replica.index.prompt_blocks or {}).values()) * (replica.block_size or 0)


def filled(share: float | None) -> str:
    return NONE if share is None else f"{bar(share, BAR)} {percent(share):>4}"


def prefilled_per_s(replica: ReplicaStatus) -> float | None:
    """The prompt tokens that were predicted not to be cached."""
    recent = replica.recent
    return None if recent is None else recent.prompt_tokens_per_s * (1 - (recent.hit_predicted or 0.0))


def heard_style(replica: ReplicaStatus) -> str:
    return BAD if profile_of(replica.engine).publishes_status and (replica.heard_age_s or 0.0) > LATE_S else ""


def counter(title: str, width: int, field: str, drop_order: int = 0) -> Column[ReplicaStatus]:
    """A figure of the event stream."""
    value = at(f"events.{field}")
    return number(title, value, count_of, width, drop_order, lambda one: DIM if (value(one) or 0) <= 0 else "")


FIGURES: tuple[Column[ReplicaStatus], ...] = (
    number("cache", at("cache_used"), filled, BAR + 5, style=lambda _: WARM),
    number("tokens", cached_tokens, short, 6, 12),
    number("hits", at("recent.hit_predicted"), percent, 4),
    number("queued", at("load.queued_tokens"), short, 6),
    number("run", at("load.running"), short, 4),
    number("wait", at("load.waiting"), short, 4, 4),
    number("req/s", at("recent.requests_per_s"), rate, 5, 1),
    number("tokens/s", at("recent.generated_tokens_per_s"), rate, 8, 1),
    number("each", at("recent.token_s"), duration, 6, 5),
    number("prefill/s", prefilled_per_s, rate, 9, 3),
    number("can/s", lambda row: row.load.prefill_tokens_per_s or None, short, 5, 11),
    number("heard", at("heard_age_s"), ago, 5, 2, heard_style),
)
STREAMS: tuple[Column[ReplicaStatus], ...] = (
    counter("batch", 7, "seq", 6),
    number("batch/s", lambda row: row.events and at("recent.batches_per_s")(row), rate, 7, 3),
    Column("last", at("events.last_event_age_s"), ago, 5, 2),
    counter("lag", 4, "lag_batches"),
    counter("gaps", 4, "gaps"),
    counter("lost", 4, "lost_batches"),
    counter("repairs", 7, "repairs"),
    counter("restarts", 8, "restarts"),
    counter("digests", 7, "digest_mismatches"),
    counter("reconnects", 10, "reconnects", 7),
    Column("accuracy", at("index.accuracy"), "{:.1%}".format, 8, 5),
)


def replica_table(columns: Sequence[Column[ReplicaStatus]]) -> Table[ReplicaStatus]:
    def found(one: ReplicaStatus) -> str:
        return " ".join([one.name, state_of(one), one.engine, one.url, *one.models, reason_of(one)])

    def place(row: ReplicaStatus) -> int:
        return STANDINGS.index(state_of(row))

    def style(row: ReplicaStatus) -> str:
        return STYLES.get(state_of(row), "")

    all_columns: tuple[Column[ReplicaStatus], ...] = (
        name("replica", lambda row: row.name, style=lambda row: "" if row.available else DIM),
        Column("state", place, STANDINGS.__getitem__, 9, style=style, right=False, fit=True),
        *columns,
        words("why", reason_of, drop_order=20, is_shown=lambda rows: any(map(reason_of, rows))),
    )
    return Table(all_columns, at("name"), found)


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


def decision_table() -> Table[DecisionRecord]:
    def style(row: DecisionRecord) -> str:
        return "red" if row.status >= 400 else DIM if row.status == 0 else ""

    def short_of(row: DecisionRecord) -> str:
        """Mark a hit shorter than predicted. A longer one is right, too: partial blocks are not predicted."""
        predicted, reported = row.predicted_cached_tokens, row.reported_cached_tokens
        return BAD if predicted is not None and reported is not None and reported < predicted else ""

    def found(one: DecisionRecord) -> str:
        return " ".join([one.chosen or "nobody", one.model, one.request_id, reason_for(one), f"status {one.status}"])

    columns: tuple[Column[DecisionRecord], ...] = (
        number("decided", at("ts"), clock, 8, right=False),
        name("chosen", lambda row: row.chosen or "nobody", style=style),
        words(
            "model",
            at("model"),
            width=5,
            fit=True,
            drop_order=10,
            is_shown=lambda rows: len({row.model for row in rows}) > 1,
        ),
        number("tokens", at("prompt_tokens"), count_of, 7, mark=lambda row: "" if row.exact else "~"),
        number("predicted", at("predicted_cached_tokens"), count_of, 9, 2),
        number("reported", at("reported_cached_tokens"), count_of, 8, 1, short_of),
        number("estimate", at("estimated_ttft_s"), duration, 8, 11),
        number("TTFT", at("ttft_s"), duration, 7, 3),
        words("why", reason_for, style=style),
    )
    return Table(columns, lambda one: f"{one.request_id} {one.ts}", found)


# ---- sessions


def session_state(row: SessionRow) -> str:
    if row.waits_s is not None:
        return f"waits {ago(row.waits_s)}" + ("" if row.is_here else ", away")
    return "computes" if row.running else f"silent {ago(row.idle_s)}"


def session_table() -> Table[SessionRow]:
    columns: tuple[Column[SessionRow], ...] = (
        name("session", at("session"), style=lambda row: "yellow" if row.waits_s is not None else ""),
        number("context", at("context_tokens"), count_of, 9),
        number("turns", at("turns"), count_of, 5),
        number("gap", at("gap_s"), duration, 7, 1),
        name("replica", lambda row: row.replica or NONE),
        words("state", session_state),
    )
    return Table(columns, at("session"), lambda row: f"{row.session} {row.replica} {session_state(row)}")


# ---- all of one row


def details_of(row: Row) -> list[Line]:
    """Every field, as the router's API names it."""
    fields: dict[str, Any] = msgspec.to_builtins(row)
    if isinstance(row, ReplicaStatus):
        reason, state = printable(reason_of(row)), state_of(row)
        first = [(printable(row.name), "bold"), ("  ", ""), (state, STYLES.get(state, ""))]
        return [[*first, (f": {reason}" if reason else "", "")], *_fields(fields)]
    if isinstance(row, SessionRow):
        return [[(printable(row.session), "bold"), (f": {session_state(row)}", "")], *_fields(fields)]
    candidates = {}  # the cached tokens and the cost of each, the cheapest first
    for one in sorted(row.candidates, key=lambda one: (one.cost_s is None, one.cost_s, one.name)):
        cost = "ineligible" if one.cost_s is None else duration(one.cost_s)
        name = f"{'>' if one.name == row.chosen else ' '} {one.name}"
        candidates[name] = f"{one.matched_tokens:,} cached, {cost}"
    fields |= {"ts": clock(row.ts), "portions": told_portions(row.portions), "candidates": candidates}
    first = [(printable(row.chosen or "nobody"), "bold"), (f": {printable(reason_for(row))}", "")]
    return [first, *_fields(fields)]


def _fields(fields: Mapping[str, Any]) -> list[Line]:
    """A line for each field that is not empty; those of nested objects come last, below their name."""
    lines: list[Line] = [
        [(f"  {printable(name):<{LABEL}}", DIM), (printable(_shown(name, value)), "")]
        for name, value in fields.items()
        if not isinstance(value, dict) and value not in (None, "", [])
    ]
    for name, value in fields.items():
        if isinstance(value, dict) and (nested := _fields(value)):
            lines += [[], [(name, "bold")], *nested]
    return lines


def _shown(name: str, value: Any) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return duration(value) if name.endswith("_s") and not name.endswith("_per_s") else f"{value:,.4g}"
        case list():
            return ", ".join(map(str, value))
    return str(value)
