"""Sums over the watched requests. Pure."""

from collections import Counter
from collections.abc import Iterable

from msgspec import Struct

from lab.shadow.record import Record


class AtOnceSums(Struct, frozen=True):
    """Requests of which it is known where they went and what was cached then."""

    requests: int = 0
    tokens: int = 0
    served_hit: float = 0.0
    chosen_hit: float = 0.0


def at_once_sums(records: Iterable[Record]) -> AtOnceSums:
    requests = tokens = 0
    served_hit = chosen_hit = 0.0
    for record in records:
        seen = record.at_once
        if seen is not None and record.replica in seen.hits:
            requests, tokens = requests + 1, tokens + record.tokens
            served_hit, chosen_hit = served_hit + seen.hits[record.replica], chosen_hit + seen.hit
    return AtOnceSums(requests, tokens, served_hit, chosen_hit)


class Reported(Struct, frozen=True):
    """Sums over the lines of a file that say how their requests were served."""

    tokens: int = 0  # of prompts whose cached tokens are reported
    cached_tokens: int = 0
    first_tokens: int = 0  # requests whose time is reported
    ttft_s: float = 0.0


def reported(records: Iterable[Record]) -> Reported:
    known = list(records)
    cached = [(one.tokens, one.cached_tokens) for one in known if one.cached_tokens is not None]
    times_s = [one.ttft_s for one in known if one.ttft_s is not None]
    return Reported(
        sum(tokens for tokens, _ in cached), sum(cached for _, cached in cached), len(times_s), sum(times_s)
    )


def sources(records: Iterable[Record]) -> Counter[str]:
    """Requests by how it is known where they went."""
    return Counter("unknown" if record.source is None else record.source for record in records)
