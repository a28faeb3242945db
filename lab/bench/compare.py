"""Two endpoints against each other: ratios, and how sure they are by Student's t over the rounds' logarithms."""

import math
from collections.abc import Callable, Sequence
from statistics import fmean, stdev

from msgspec import Struct

from lab.bench.figures import Figures

# For 95 % on both sides, by degrees of freedom; beyond these the last one is near enough.
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10)

FIGURES: dict[str, Callable[[Figures], float | None]] = {
    "TTFT mean": lambda figures: figures.ttft_s.mean,
    "TTFT p50": lambda figures: figures.ttft_s.p50,
    "TTFT p95": lambda figures: figures.ttft_s.p95,
    "TTFT p99": lambda figures: figures.ttft_s.p99,
    "TPOT mean": lambda figures: figures.tpot_s.mean,
    "e2e mean": lambda figures: figures.e2e_s.mean,
    "e2e p50": lambda figures: figures.e2e_s.p50,
    "e2e p95": lambda figures: figures.e2e_s.p95,
    "e2e p99": lambda figures: figures.e2e_s.p99,
    "hit rate": lambda figures: figures.hit_rate,
    "requests/s": lambda figures: figures.requests_per_s,
    "input tokens/s": lambda figures: figures.input_tokens_per_s,
    "output tokens/s": lambda figures: figures.output_tokens_per_s,
}


class Ratio(Struct, frozen=True):
    """`ratio` is second / first; None: one of them is 0 or has no value in some round."""

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


def compare(rounds: Sequence[tuple[Figures, Figures]]) -> list[Ratio]:
    """`rounds`: the figures of both endpoints, round by round; nothing can be said of none."""
    if not rounds:
        return []
    return [ratio(name, [(value(first), value(second)) for first, second in rounds]) for name, value in FIGURES.items()]


def ratio(name: str, rounds: Sequence[tuple[float | None, float | None]]) -> Ratio:
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
