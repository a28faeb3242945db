"""Sums up the outcomes of a run."""

import os
import platform
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from lab.bench.client import TOO_MANY, Outcome
from lab.bench.load import LAG_SHARE, Overhead
from lab.bench.probe import Probe
from lab.percentiles import Spread, spread


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
    sessions: int = 0  # those of which every turn was answered
    session_mean_s: float | None = None  # from a session's arrival to its last token
    session_p99_s: float | None = None
    sent_away: int = 0  # answers with status 429 to those that came again when told
    began_when_told: int = 0  # those among them that were answered then


def figures(ran: Sequence[Outcome]) -> Figures:
    outcomes = [outcome for outcome in ran if not outcome.is_warm_up]
    answered = [outcome for outcome in outcomes if not outcome.error]
    failed = [outcome for outcome in outcomes if outcome.error]
    first_s = min((outcome.intended_s for outcome in outcomes), default=0.0)
    span_s = max((outcome.end_s for outcome in outcomes), default=first_s) - first_s
    per_s = 1 / span_s if span_s else 0.0
    told = [outcome.prompt_tokens for outcome in answered if outcome.prompt_tokens is not None]
    input_tokens = sum(told) if told else None
    output_tokens = sum(outcome.output_tokens or 0 for outcome in answered)
    cached = [outcome.cached_tokens for outcome in answered if outcome.cached_tokens is not None]
    by_replica: dict[str, list[Outcome]] = defaultdict(list)  # keyed by the name that a router gives
    for outcome in answered:
        if outcome.replica is not None:
            by_replica[outcome.replica].append(outcome)
    sessions: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        sessions[outcome.talk].append(outcome)
    session_s = spread(
        turns[-1].end_s - turns[0].intended_s
        for turns in sessions.values()
        if len(turns) == turns[0].session_turns and not any(outcome.error for outcome in turns)
    )
    return Figures(
        requests=len(outcomes),
        failed=len(failed),
        warm_up=len(ran) - len(outcomes),
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
        sessions=session_s.count,
        session_mean_s=session_s.mean,
        session_p99_s=session_s.p99,
        sent_away=sum(outcome.sent_away for outcome in outcomes),
        began_when_told=sum(outcome.sent_away > 0 for outcome in answered),
    )


def hit_rate(answered: Sequence[Outcome]) -> float | None:
    both = [
        (outcome.cached_tokens, outcome.prompt_tokens)
        for outcome in answered
        if outcome.cached_tokens is not None and outcome.prompt_tokens
    ]
    return sum(cached for cached, _ in both) / sum(prompt for _, prompt in both) if both else None


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
    figures: Figures
    own: list[Overhead]  # the load generator's own: one
    unfinished: int


class Result(Struct, frozen=True):
    """Rules for editing: new fields go last with a default, nothing is renamed."""

    format: str
    version: str
    machine: Machine
    began: str  # a time in UTC
    settings: dict[str, Any]
    interrupted: bool
    endpoints: list[EndpointResult]  # one
    warnings: list[str]


def machine() -> Machine:
    python = f"{platform.python_implementation()} {platform.python_version()}"
    cpus = Path("/proc/cpuinfo").read_text(errors="replace").splitlines() if sys.platform == "linux" else ()
    names = (line.partition(":")[2].strip() for line in cpus if line.startswith("model name"))
    cpu = next(names, platform.processor() or platform.machine())
    return Machine(platform.platform(), cpu, os.cpu_count() or 0, python)


def warnings(endpoint: EndpointResult) -> Iterator[str]:
    figures, probe, [own] = endpoint.figures, endpoint.probe, endpoint.own
    latencies = {"first tokens": figures.ttft_s.p99, "tokens after the first": figures.itl_s.p99}
    late = [name for name, p99_s in latencies.items() if own.delays(p99_s)]
    if late:
        yield (
            f"the load generator itself was late by {own.lag_p99_s * 1000:.1f} ms at p99, more than {LAG_SHARE:.0%} of "
            f"the p99 of {' and of '.join(late)}; give it a core of its own, or ask for less at once"
        )
    if own.is_busy:
        yield (
            f"the load generator used {own.cpu_share:.0%} of its core, and may be what limits the rate; "
            "ask for less at once"
        )
    late_s = figures.sent_late_s.p99
    if late_s is not None and late_s > LATE_LIMIT_S:
        yield f"requests were sent late, by {late_s * 1000:.0f} ms at p99: it could not keep the rate"
    if not probe.is_measured:
        yield "it does not tell the length of prompts; a word was taken for a token"
    if not probe.ignores_eos:
        yield "it refuses ignore_eos, so answers may be shorter than was asked for"
