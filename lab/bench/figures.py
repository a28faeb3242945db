"""Sums up the outcomes of a run, and compares those of two endpoints.

A comparison has ratios, and how sure they are by Student's t over the rounds' logarithms.
"""

import math
import os
import platform
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from msgspec import Struct

from lab.bench.client import Outcome
from lab.bench.load import LAG_SHARE, Overhead
from lab.bench.probe import Probe
from lab.percentiles import Spread, spread

TOO_MANY = 429


class ReplicaFigures(Struct, frozen=True):
    requests: int
    share: float
    hit_rate: float | None
    ttft_s: Spread


class Figures(Struct, frozen=True):
    """Warm-up is left out of everything but `warm_up`. Latencies count from the intended time of sending."""

    requests: int  # answered or failed
    failed: int
    warm_up: int
    span_s: float  # the time from the first one's intended start to the last one's end
    requests_per_s: float  # answered ones
    input_tokens: int | None
    output_tokens: int
    input_tokens_per_s: float | None
    output_tokens_per_s: float
    asked_tokens: int  # the planned tokens of all prompts
    cached_tokens: int | None  # None: not told
    hit_rate: float | None  # a share of the prompt tokens of those that tell both
    ttft_s: Spread
    itl_s: Spread  # between events that have tokens
    tpot_s: Spread  # a request's time for each token after its first
    e2e_s: Spread
    sent_late_s: Spread  # after the intended time: the load generator's own delay
    errors: dict[str, int]
    examples: dict[str, str]  # the words about the first of each kind
    too_many: int  # refused with status 429
    replicas: dict[str, ReplicaFigures]


def figures(runs: Sequence[Sequence[Outcome]]) -> Figures:
    """Several runs of the same kind count together, with their spans one after another."""
    counted = [[outcome for outcome in run if not outcome.is_warm_up] for run in runs]
    outcomes = [outcome for run in counted for outcome in run]
    answered = [outcome for outcome in outcomes if not outcome.error]
    failed = [outcome for outcome in outcomes if outcome.error]
    span_s = sum(max(one.end_s for one in run) - min(one.intended_s for one in run) for run in counted if run)
    per_s = 1 / span_s if span_s else 0.0
    told = [outcome.prompt_tokens for outcome in answered if outcome.prompt_tokens is not None]
    input_tokens = sum(told) if told else None
    output_tokens = sum(outcome.output_tokens or 0 for outcome in answered)
    cached = [outcome.cached_tokens for outcome in answered if outcome.cached_tokens is not None]
    by_replica: dict[str, list[Outcome]] = defaultdict(list)  # keyed by the name that a router gives
    for outcome in answered:
        if outcome.replica is not None:
            by_replica[outcome.replica].append(outcome)
    return Figures(
        requests=len(outcomes),
        failed=len(failed),
        warm_up=sum(map(len, runs)) - len(outcomes),
        span_s=span_s,
        requests_per_s=len(answered) * per_s,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        input_tokens_per_s=None if input_tokens is None else input_tokens * per_s,
        output_tokens_per_s=output_tokens * per_s,
        asked_tokens=sum(outcome.asked_tokens for outcome in outcomes),
        cached_tokens=sum(cached) if cached else None,
        hit_rate=hit_rate(answered),
        ttft_s=spread(outcome.ttft_s for outcome in answered),
        itl_s=spread(gap_s for outcome in answered for gap_s in outcome.gaps_s),
        tpot_s=spread(outcome.tpot_s for outcome in answered),
        e2e_s=spread(outcome.e2e_s for outcome in answered),
        sent_late_s=spread(max(0.0, outcome.sent_s - outcome.intended_s) for outcome in outcomes),
        errors=dict(Counter(outcome.error for outcome in failed if outcome.error).most_common()),
        examples={outcome.error: outcome.detail for outcome in reversed(failed) if outcome.error},
        too_many=sum(outcome.status == TOO_MANY for outcome in failed),
        replicas={
            name: ReplicaFigures(len(own), len(own) / len(answered), hit_rate(own), spread(one.ttft_s for one in own))
            for name, own in sorted(by_replica.items())
        },
    )


def hit_rate(answered: Sequence[Outcome]) -> float | None:
    both = [
        (outcome.cached_tokens, outcome.prompt_tokens)
        for outcome in answered
        if outcome.cached_tokens is not None and outcome.prompt_tokens
    ]
    return sum(cached for cached, _ in both) / sum(prompt for _, prompt in both) if both else None


# These are for 95 % on both sides, by degrees of freedom; beyond these the last one is near enough.
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


FORMAT = "warmroute-bench/1"
LATE_LIMIT_S = 0.02


class Machine(Struct, frozen=True):
    system: str
    cpu: str
    cpus: int
    python: str


class EndpointResult(Struct, frozen=True):
    url: str
    probe: Probe
    figures: Figures  # the figures of all rounds
    rounds: list[Figures]
    own: list[Overhead]  # the load generator's own, round by round
    unfinished: int


class Result(Struct, frozen=True):
    """Rules for editing: new fields go last with a default, nothing is renamed."""

    format: str
    version: str
    machine: Machine
    began: str  # a time in UTC
    settings: dict[str, Any]
    interrupted: bool
    endpoints: list[EndpointResult]
    comparison: list[Ratio]  # the second endpoint / the first
    warnings: list[str]


def machine() -> Machine:
    python = f"{platform.python_implementation()} {platform.python_version()}"
    cpus = Path("/proc/cpuinfo").read_text(errors="replace").splitlines() if sys.platform == "linux" else ()
    names = (line.partition(":")[2].strip() for line in cpus if line.startswith("model name"))
    cpu = next(names, platform.processor() or platform.machine())
    return Machine(platform.platform(), cpu, os.cpu_count() or 0, python)


def warnings(endpoint: EndpointResult) -> Iterator[str]:
    figures, probe = endpoint.figures, endpoint.probe
    latencies = {"first tokens": figures.ttft_s.p99, "tokens after the first": figures.itl_s.p99}
    late = [name for name, p99_s in latencies.items() if any(own.delays(p99_s) for own in endpoint.own)]
    if late:
        lag_s = max(own.lag_p99_s for own in endpoint.own)
        yield (
            f"the load generator itself was late by {lag_s * 1000:.1f} ms at p99, more than {LAG_SHARE:.0%} of the "
            f"p99 of {' and of '.join(late)}; give it a core of its own, or ask for less at once"
        )
    if any(own.is_busy for own in endpoint.own):
        share = max(own.cpu_share for own in endpoint.own)
        yield f"the load generator used {share:.0%} of its core, and may be what limits the rate; ask for less at once"
    late_s = figures.sent_late_s.p99
    if late_s is not None and late_s > LATE_LIMIT_S:
        yield f"requests were sent late, by {late_s * 1000:.0f} ms at p99: it could not keep the rate"
    if not probe.is_measured:
        yield "it does not tell the length of prompts; a word was taken for a token"
    if not probe.ignores_eos:
        yield "it refuses ignore_eos, so answers may be shorter than was asked for"
