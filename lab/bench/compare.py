"""Two endpoints against each other: ratios, and how sure they are.

Latencies and the hit rate: a bootstrap that draws rounds, and within each round requests, with both endpoints' answers
to the same request drawn together. Rates, of which a round has only one: Student's t over the logarithms of the rounds'
ratios.
"""

import math
import random
from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from msgspec import Struct

from lab.bench.figures import Figures
from lab.bench.outcome import Outcome
from lab.percentiles import percentile

CONFIDENCE = 0.95
MOST_DRAWS, LEAST_DRAWS = 1000, 200
DRAWN_REQUESTS = 800_000  # in all draws together: about two seconds
# Student's t for 95 % on both sides, by degrees of freedom; beyond these the last one is near enough.
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10)


class Ratio(Struct, frozen=True):
    """`ratio` is second / first; None: one of them is 0 or has no value."""

    name: str
    first: float | None
    second: float | None
    ratio: float | None
    low: float | None  # None: not known, as of one round
    high: float | None

    @property
    def is_sure(self) -> bool:
        """True if the interval excludes 1, where both are equal."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high


class Pair(NamedTuple):
    """One request's outcomes at both endpoints; None where it was not sent, or failed."""

    first: Outcome | None
    second: Outcome | None


Values = list[tuple[float, float]]  # of each request; the second one is a weight where the statistic has one
Statistic = Callable[[Values], float]


class Metric(NamedTuple):
    name: str
    value: Callable[[Outcome], tuple[float, float] | None]
    statistic: Statistic


def paired(first: Sequence[Outcome], second: Sequence[Outcome]) -> list[Pair]:
    """Pair outcomes by conversation and turn, without warm-up."""
    of_first, of_second = (
        {(one.talk, one.turn): one for one in each if not one.is_warm_up} for each in (first, second)
    )
    keys = list(dict.fromkeys([*of_first, *of_second]))
    return [Pair(_answered(of_first.get(key)), _answered(of_second.get(key))) for key in keys]


def _answered(outcome: Outcome | None) -> Outcome | None:
    return None if outcome is None or outcome.error else outcome


def compare(
    rounds: Sequence[Sequence[Pair]],
    of_rounds: Sequence[tuple[Figures, Figures]],
    seed: str,
    most_draws: int = MOST_DRAWS,
) -> list[Ratio]:
    rates = [rate_ratio(name, [(value(first), value(second)) for first, second in of_rounds]) for name, value in RATES]
    return [*_of_requests(rounds, random.Random(f"bootstrap {seed}"), most_draws), *rates]


# ---- latencies and hits


def _single(value: float | None) -> tuple[float, float] | None:
    return None if value is None else (value, 1.0)


def _hits(outcome: Outcome) -> tuple[float, float] | None:
    if outcome.cached_tokens is None or not outcome.prompt_tokens:
        return None
    return float(outcome.cached_tokens), float(outcome.prompt_tokens)


def _weighted(values: Values) -> float:
    return sum(value for value, _ in values) / sum(weight for _, weight in values)


def _at(share: float) -> Statistic:
    return lambda values: percentile(sorted(value for value, _ in values), share)


SHARES = (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
METRICS = (
    Metric("TTFT mean", lambda outcome: _single(outcome.ttft_s), _weighted),
    *(Metric(f"TTFT {name}", lambda outcome: _single(outcome.ttft_s), _at(share)) for name, share in SHARES),
    Metric("TPOT mean", lambda outcome: _single(outcome.tpot_s), _weighted),
    Metric("e2e mean", lambda outcome: _single(outcome.e2e_s), _weighted),
    *(Metric(f"e2e {name}", lambda outcome: _single(outcome.e2e_s), _at(share)) for name, share in SHARES),
    Metric("hit rate", _hits, _weighted),
)


Columns = Sequence[Sequence[tuple[float, float] | None]]  # of both endpoints: one metric in one round, by request
Draw = Sequence[tuple[int, Sequence[int]]]  # rounds, with the requests drawn of each


def _of_requests(rounds: Sequence[Sequence[Pair]], chance: random.Random, most_draws: int) -> list[Ratio]:
    columns = [[_columns(metric, pairs) for pairs in rounds] for metric in METRICS]
    whole = [(number, range(len(pairs))) for number, pairs in enumerate(rounds)]
    found = [_pooled(metric, own, whole) for metric, own in zip(METRICS, columns, strict=True)]
    drawn: list[list[float]] = [[] for _ in METRICS]
    total = max(1, sum(map(len, rounds)))
    for _ in range(max(LEAST_DRAWS, min(most_draws, DRAWN_REQUESTS // total))):
        draw = _draw(rounds, chance)
        for metric, own, ratios in zip(METRICS, columns, drawn, strict=True):
            if (ratio := _ratio(*_pooled(metric, own, draw))) is not None:
                ratios.append(ratio)
    return [
        Ratio(metric.name, *both, _ratio(*both), *_interval(ratios))
        for metric, both, ratios in zip(METRICS, found, drawn, strict=True)
    ]


def _columns(metric: Metric, pairs: Sequence[Pair]) -> Columns:
    sides = [pair.first for pair in pairs], [pair.second for pair in pairs]
    return [[metric.value(one) if one is not None else None for one in side] for side in sides]


def _draw(rounds: Sequence[Sequence[Pair]], chance: random.Random) -> Draw:
    numbers = [number for number, pairs in enumerate(rounds) if pairs]
    drawn = []
    for number in chance.choices(numbers, k=len(numbers)) if numbers else ():
        size = len(rounds[number])
        drawn.append((number, [int(chance.random() * size) for _ in range(size)]))
    return drawn


def _pooled(metric: Metric, rounds: Sequence[Columns], draw: Draw) -> tuple[float | None, float | None]:
    """Return the statistic of each endpoint; None without values."""

    def of(side: int) -> float | None:
        taken = (rounds[number][side][place] for number, places in draw for place in places)
        values = [value for value in taken if value is not None]
        return metric.statistic(values) if values else None

    return of(0), of(1)


def _ratio(first: float | None, second: float | None) -> float | None:
    return second / first if first and second is not None else None


def _interval(ratios: list[float]) -> tuple[float | None, float | None]:
    if len(ratios) < LEAST_DRAWS // 2:  # one of them hardly ever had a value
        return None, None
    ratios.sort()
    return percentile(ratios, (1 - CONFIDENCE) / 2), percentile(ratios, (1 + CONFIDENCE) / 2)


# ---- rates

RATES: tuple[tuple[str, Callable[[Figures], float | None]], ...] = (
    ("requests/s", lambda figures: figures.requests_per_s),
    ("input tokens/s", lambda figures: figures.input_tokens_per_s),
    ("output tokens/s", lambda figures: figures.output_tokens_per_s),
)


def rate_ratio(name: str, rounds: Sequence[tuple[float | None, float | None]]) -> Ratio:
    known = [(first, second) for first, second in rounds if first and second]
    if not known or len(known) < len(rounds):
        return Ratio(name, None, None, None, None, None)
    logs = [math.log(second / first) for first, second in known]
    middle = fmean(logs)
    low = high = None
    if len(logs) > 1:
        half = T_95[min(len(logs) - 1, len(T_95)) - 1] * stdev(logs) / math.sqrt(len(logs))
        low, high = math.exp(middle - half), math.exp(middle + half)
    first, second = (fmean(each) for each in zip(*known, strict=True))
    return Ratio(name, first, second, math.exp(middle), low, high)
