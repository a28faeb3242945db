"""Rows of the tables, the values that they show, and in words the state of a replica and the reason of a decision."""

import re
import time
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from events.tool.words import printable
from router.console.formatting import NONE, duration
from router.prompts.prefixes.tree import Prefix
from router.responses import DecisionRecord, ReplicaStatus
from router.top.history import Rates
from router.top.poller import Poller

LAGGING_BATCHES = 8  # a few are always in flight
STATES = ("down", "draining", "lagging", "partial", "approximate", "exact")
STYLES = {
    "down": "bold red",
    "draining": "cyan",
    "lagging": "bold yellow",
    "partial": "yellow",
    "approximate": "",
    "exact": "green",
}
DRAINING = ("draining", "it drains")  # by an operator, by the replica itself


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


GPU = "GPU"


class Row(NamedTuple):
    """A replica with its recent rates and counters."""

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
    found = poller.shared.prefixes if poller.shared is not None else []
    return [branch for number, one in enumerate(found) for branch in _branches(one, (), str(number))]


def _branches(prefix: Prefix, above: tuple[Prefix, ...], key: str) -> Iterator[Branch]:
    yield Branch(prefix, above, prefix.id or key)
    for number, below in enumerate(prefix.below):
        yield from _branches(below, (*above, prefix), f"{key}.{number}")


@lru_cache(10_000)
def natural(name: str) -> list[tuple[int, str]]:
    """Sort key of a name: `demo-10` comes after `demo-9`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d{1,18})", name)]


# ---- replicas


def cache_use(replica: ReplicaStatus) -> float | None:
    """The cache's used share; None: its size is unknown."""
    total = replica.load.total_blocks
    return min(1.0, replica.index.blocks.get(GPU, 0) / total) if total else None


def cached_tokens(replica: ReplicaStatus) -> int:
    """The tokens that prompts can use; of an older router, those in the blocks of all groups."""
    index = replica.index
    blocks = index.blocks if index.prompt_blocks is None else index.prompt_blocks
    return sum(blocks.values()) * (replica.block_size or 0)


# ---- prefixes


def saved_tokens(prefix: Prefix) -> int:
    """Prompt tokens that a cache saves: all prompts but the first can reuse the prefix."""
    return prefix.tokens * (prefix.prompts - 1)


def text_of(prefix: Prefix) -> str:
    return printable(" ".join((prefix.text or "").split()))


# ---- decisions


def is_mispredicted(decision: DecisionRecord) -> bool:
    """Tell whether less was cached than predicted. More is right too: partial blocks are not predicted."""
    predicted, reported = decision.predicted_cached_tokens, decision.reported_cached_tokens
    return predicted is not None and reported is not None and reported < predicted


def clock(ts: float) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(ts))
    except (OverflowError, ValueError, OSError):  # a time outside the calendar
        return NONE


def tokens_or_none(tokens: int | None) -> str:
    return NONE if tokens is None else f"{tokens:,}"


BY_POLICY = {"round-robin": "its turn", "random": "at random", "least-loaded": "least loaded"}


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
    return ", ".join(part for part in parts if part)


def _chosen(decision: DecisionRecord) -> str:
    if decision.policy in BY_POLICY:
        return BY_POLICY[decision.policy]
    able = {one.name: one for one in decision.candidates if one.cost_s is not None}
    chosen = able.pop(decision.chosen or "", None)
    if chosen is None:  # chosen at first, and ineligible at the last decision
        return ""
    if not able:
        return "the only eligible replica"
    fullest = max(able.values(), key=lambda one: one.matched_tokens)
    ahead, dearer_s = chosen.matched_tokens - fullest.matched_tokens, (fullest.cost_s or 0.0) - (chosen.cost_s or 0.0)
    if ahead > 0:
        return f"most cached, +{ahead:,}"
    if ahead < 0:
        return f"{fullest.name} has +{-ahead:,}, but costs {duration(dearer_s)} more"
    is_cheapest = all((chosen.cost_s or 0.0) <= (one.cost_s or 0.0) for one in able.values())
    return f"{'tied' if chosen.matched_tokens else 'cold'}: {'lowest cost' if is_cheapest else 'at random'}"
