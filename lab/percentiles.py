"""Means and percentiles, interpolated as numpy's are."""

from collections.abc import Iterable, Sequence
from statistics import fmean

from msgspec import Struct

SHOWN = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


class Spread(Struct, frozen=True):
    """Mean and percentiles of `count` values; None without values."""

    count: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None


def percentile(ascending: Sequence[float], share: float) -> float:
    """ValueError of no values."""
    if not ascending:
        raise ValueError("no values have no percentile")
    place = share * (len(ascending) - 1)
    below = int(place)
    above = min(below + 1, len(ascending) - 1)
    return ascending[below] + (ascending[above] - ascending[below]) * (place - below)


def spread(values: Iterable[float | None]) -> Spread:
    found = sorted(value for value in values if value is not None)
    if not found:
        return Spread(0)
    shares = {name: percentile(found, share) for name, share in SHOWN.items()}
    return Spread(len(found), fmean(found), **shares, max=found[-1])
