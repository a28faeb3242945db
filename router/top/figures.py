"""What is known of a router as rows, and the figures that a row shows."""

import re
import time
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from events.tool.words import printable
from router.prefixes.shared import Prefix
from router.top.answers import Decision, Replica
from router.top.history import Rates
from router.top.watch import Watch
from router.top.words import NONE

GPU = "GPU"


class Row(NamedTuple):
    """A replica, and what happened to it lately."""

    replica: Replica
    rates: Rates | None
    risen: frozenset[str]


class Branch(NamedTuple):
    """A prefix, and those that it comes after."""

    prefix: Prefix
    above: tuple[Prefix, ...]
    key: str  # stays the same while others come and go; its place where the router gives it no name


def rows_of(watch: Watch) -> list[Row]:
    history = watch.history
    rows = [Row(one, history.rates(one.name), history.risen(one.name)) for one in watch.replicas]
    return sorted(rows, key=lambda row: natural(row.replica.name))


def branches_of(watch: Watch) -> list[Branch]:
    found = watch.shared.prefixes if watch.shared is not None else []
    return [branch for number, one in enumerate(found) for branch in _branches(one, (), str(number))]


def _branches(prefix: Prefix, above: tuple[Prefix, ...], key: str) -> Iterator[Branch]:
    yield Branch(prefix, above, prefix.id or key)
    for number, below in enumerate(prefix.below):
        yield from _branches(below, (*above, prefix), f"{key}.{number}")


@lru_cache(10_000)
def natural(name: str) -> list[tuple[int, str]]:
    """`demo-10` after `demo-9`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d{1,18})", name)]


# ---- replicas


def cache_use(replica: Replica) -> float | None:
    """None: nobody says how large it is."""
    total = replica.load.total_blocks
    return min(1.0, replica.index.blocks.get(GPU, 0) / total) if total else None


def cached_tokens(replica: Replica) -> int:
    return sum(replica.index.blocks.values()) * (replica.block_size or 0)


# ---- prefixes


def saved_tokens(prefix: Prefix) -> int:
    """Of the prompts that have it, all but the first can have it from a cache."""
    return prefix.tokens * (prefix.prompts - 1)


def text_of(prefix: Prefix) -> str:
    return printable(" ".join((prefix.text or "").split()))


# ---- decisions


def is_mispredicted(decision: Decision) -> bool:
    """Less was cached than was predicted. More is no mistake: beginnings of blocks are not predicted."""
    predicted, reported = decision.predicted_cached_tokens, decision.reported_cached_tokens
    return predicted is not None and reported is not None and reported < predicted


def clock(ts: float) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(ts))
    except (OverflowError, ValueError, OSError):  # of a time that no calendar has
        return NONE


def tokens_or_none(tokens: int | None) -> str:
    return "-" if tokens is None else f"{tokens:,}"
