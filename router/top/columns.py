"""The four tables, and what their columns say."""

from events.tool.words import printable
from router.prefixes.draw import BRANCH, DEEPEST, holders
from router.top.answers import Decision, Events, Replica
from router.top.figures import (
    Branch,
    Row,
    cache_use,
    cached_tokens,
    clock,
    is_mispredicted,
    natural,
    saved_tokens,
    text_of,
    tokens_or_none,
)
from router.top.reasons import reason_for
from router.top.states import STATES, STYLES, reason_of, state_of
from router.top.table import Column, Table
from router.top.words import ago, duration, percent, rate, short

BAD = "bold red"
DIM = "dim"
LATE_S = 1.0  # a heartbeat comes four times a second


def _busy(number: float, replica: Replica) -> str:
    return short(number) if replica.available or number else "-"


def _or_low(value: float | None) -> float:
    return -1.0 if value is None else value


def _heard_style(row: Row) -> str:
    return BAD if (row.replica.heard_age_s or 0.0) > LATE_S else ""


NAME: Column[Row] = Column(
    "replica",
    lambda row: printable(row.replica.name),
    lambda row: natural(row.replica.name),
    width=8,
    right=False,
    measured=True,
    name=True,
    style=lambda row: "" if row.replica.available else DIM,
)
STATE: Column[Row] = Column(
    "state",
    lambda row: state_of(row.replica),
    lambda row: STATES.index(state_of(row.replica)),
    width=9,
    right=False,
    measured=True,
    style=lambda row: STYLES[state_of(row.replica)],
)
REASON: Column[Row] = Column(
    "why",
    lambda row: printable(reason_of(row.replica)),
    lambda row: reason_of(row.replica),
    right=False,
    dispensable=20,
    tells=lambda rows: any(reason_of(row.replica) for row in rows),
)
LOAD_COLUMNS: tuple[Column[Row], ...] = (
    NAME,
    STATE,
    Column(
        "cache",
        lambda row: percent(cache_use(row.replica)),
        lambda row: _or_low(cache_use(row.replica)),
        5,
        falling=True,
    ),
    Column(
        "tokens",
        lambda row: short(cached_tokens(row.replica)),
        lambda row: cached_tokens(row.replica),
        6,
        dispensable=12,
        falling=True,
    ),
    Column(
        "hits",
        lambda row: percent(row.rates.hit if row.rates else None),
        lambda row: _or_low(row.rates.hit if row.rates else None),
        4,
        falling=True,
    ),
    Column(
        "queued",
        lambda row: _busy(row.replica.load.queued_tokens, row.replica),
        lambda row: row.replica.load.queued_tokens,
        6,
        falling=True,
    ),
    Column(
        "run",
        lambda row: _busy(row.replica.load.running, row.replica),
        lambda row: row.replica.load.running,
        4,
        falling=True,
    ),
    Column(
        "wait",
        lambda row: _busy(row.replica.load.waiting, row.replica),
        lambda row: row.replica.load.waiting,
        4,
        dispensable=4,
        falling=True,
    ),
    Column(
        "req/s",
        lambda row: rate(row.rates.requests_per_s if row.rates else None),
        lambda row: _or_low(row.rates.requests_per_s if row.rates else None),
        5,
        dispensable=1,
        falling=True,
    ),
    Column(
        "prefill/s",
        lambda row: rate(row.rates.prefill_tokens_per_s if row.rates else None),
        lambda row: _or_low(row.rates.prefill_tokens_per_s if row.rates else None),
        9,
        dispensable=3,
        falling=True,
    ),
    Column(
        "can/s",
        lambda row: short(row.replica.load.prefill_tokens_per_s or None),
        lambda row: row.replica.load.prefill_tokens_per_s,
        5,
        dispensable=11,
        falling=True,
    ),
    Column(
        "heard",
        lambda row: ago(row.replica.heard_age_s),
        lambda row: _or_low(row.replica.heard_age_s),
        5,
        dispensable=2,
        style=_heard_style,
        falling=True,
    ),
    REASON,
)


def events_column(title: str, field: str, width: int, dispensable: int = 0) -> Column[Row]:
    """A counter; red for a minute after it rose."""

    def value(row: Row) -> int:
        return -1 if row.replica.events is None else int(getattr(row.replica.events, field))

    return Column(
        title,
        lambda row: "-" if row.replica.events is None else f"{value(row):,}",
        value,
        width,
        dispensable=dispensable,
        style=lambda row: BAD if field in row.risen else DIM if value(row) <= 0 else "",
        falling=True,
    )


def _last_event_s(events: Events | None) -> float | None:
    return None if events is None else events.last_event_age_s


EVENT_COLUMNS: tuple[Column[Row], ...] = (
    NAME,
    STATE,
    events_column("batch", "seq", 7, dispensable=6),
    Column(
        "batch/s",
        lambda row: rate(row.rates.batches_per_s if row.rates else None) if row.replica.events else "-",
        lambda row: _or_low(row.rates.batches_per_s if row.rates else None),
        7,
        dispensable=3,
        falling=True,
    ),
    Column(
        "last",
        lambda row: ago(_last_event_s(row.replica.events)),
        lambda row: _or_low(_last_event_s(row.replica.events)),
        5,
        dispensable=2,
    ),
    events_column("lag", "lag_batches", 4),
    events_column("gaps", "gaps", 4),
    events_column("lost", "lost_batches", 4),
    events_column("repairs", "repairs", 7),
    events_column("restarts", "restarts", 8),
    events_column("digests", "digest_mismatches", 7),
    events_column("reconnects", "reconnects", 10, dispensable=7),
    Column(
        "accuracy",
        lambda row: f"{row.replica.index.accuracy:.1%}",
        lambda row: row.replica.index.accuracy,
        8,
        dispensable=5,
    ),
    REASON,
)


def _tokens_text(branch: Branch) -> str:
    return f"{'' if branch.prefix.exact else '~'}{'+' if branch.above else ''}{branch.prefix.tokens:,}"


def _tree_text(branch: Branch) -> str:
    return f"{BRANCH * min(len(branch.above), DEEPEST)}{_tokens_text(branch)}"


PREFIX_COLUMNS: tuple[Column[Branch], ...] = (
    Column(
        "prefix tokens",
        _tree_text,
        lambda branch: branch.prefix.tokens,
        13,
        right=False,
        measured=True,
        sorted_text=_tokens_text,
        falling=True,
        style=lambda branch: "" if branch.prefix.held_by else DIM,
    ),
    Column(
        "prompts", lambda branch: f"{branch.prefix.prompts:,}", lambda branch: branch.prefix.prompts, 7, falling=True
    ),
    Column(
        "saves",
        lambda branch: short(saved_tokens(branch.prefix)),
        lambda branch: saved_tokens(branch.prefix),
        5,
        falling=True,
        dispensable=3,
    ),
    Column("last", lambda branch: ago(branch.prefix.idle_s), lambda branch: branch.prefix.idle_s, 5, dispensable=1),
    Column(
        "held by",
        lambda branch: holders(branch.prefix),
        lambda branch: branch.prefix.held_by,
        8,
        right=False,
        measured=True,
        dispensable=2,
        falling=True,
    ),
    Column(
        "model",
        lambda branch: printable(branch.prefix.model),
        lambda branch: branch.prefix.model,
        5,
        right=False,
        measured=True,
        dispensable=10,
        tells=lambda branches: len({branch.prefix.model for branch in branches}) > 1,
    ),
    Column("text", lambda branch: text_of(branch.prefix), lambda branch: branch.prefix.text or "", right=False),
)


def _decision_style(decision: Decision) -> str:
    return "red" if decision.status >= 400 else DIM if decision.status == 0 else ""


DECISION_COLUMNS: tuple[Column[Decision], ...] = (
    Column("decided", lambda one: clock(one.ts), lambda one: one.ts, 8, right=False, falling=True),
    Column(
        "chosen",
        lambda one: printable(one.chosen or "nobody"),
        lambda one: natural(one.chosen or ""),
        8,
        right=False,
        measured=True,
        name=True,
        style=_decision_style,
    ),
    Column(
        "model",
        lambda one: printable(one.model),
        lambda one: one.model,
        5,
        right=False,
        measured=True,
        dispensable=10,
        tells=lambda decisions: len({one.model for one in decisions}) > 1,
    ),
    Column(
        "tokens",
        lambda one: f"{'' if one.exact else '~'}{one.prompt_tokens:,}",
        lambda one: one.prompt_tokens,
        7,
        falling=True,
    ),
    Column(
        "predicted",
        lambda one: tokens_or_none(one.predicted_cached_tokens),
        lambda one: _or_low(one.predicted_cached_tokens),
        9,
        dispensable=2,
        falling=True,
    ),
    Column(
        "reported",
        lambda one: tokens_or_none(one.reported_cached_tokens),
        lambda one: _or_low(one.reported_cached_tokens),
        8,
        dispensable=1,
        style=lambda one: BAD if is_mispredicted(one) else "",
        falling=True,
    ),
    Column(
        "estimate",
        lambda one: duration(one.estimated_ttft_s),
        lambda one: _or_low(one.estimated_ttft_s),
        8,
        dispensable=11,
        falling=True,
    ),
    Column("TTFT", lambda one: duration(one.ttft_s), lambda one: _or_low(one.ttft_s), 7, dispensable=3, falling=True),
    Column("why", reason_for, reason_for, right=False, style=_decision_style),
)


# ---- tables


def replica_table() -> Table[Row]:
    return Table(LOAD_COLUMNS, lambda row: row.replica.name, _replica_words)


def event_table() -> Table[Row]:
    return Table(EVENT_COLUMNS, lambda row: row.replica.name, _replica_words)


def prefix_table() -> Table[Branch]:
    """What a cache saves most by comes first; unsorted it is a tree."""
    table = Table(
        PREFIX_COLUMNS,
        lambda branch: branch.key,
        lambda branch: " ".join([branch.prefix.model, branch.prefix.text or "", *branch.prefix.replicas]),
    )
    table.sort_by([column.title for column in PREFIX_COLUMNS].index("saves"))
    return table


def decision_table() -> Table[Decision]:
    return Table(
        DECISION_COLUMNS,
        lambda one: f"{one.request_id} {one.ts}",
        lambda one: " ".join(
            [one.chosen or "nobody", one.model, one.request_id, reason_for(one), f"status {one.status}"]
        ),
    )


def _replica_words(row: Row) -> str:
    replica = row.replica
    return " ".join([replica.name, state_of(replica), replica.engine, replica.url, *replica.models, reason_of(replica)])
