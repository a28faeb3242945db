"""Runs policies and bounds on the same arrivals, and sums up: hit rate, times to first token, balance."""

from collections.abc import Callable, Iterable, Sequence
from heapq import heapreplace
from statistics import fmean
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from lab.percentiles import percentile
from lab.simulation.fleet import simulated
from lab.simulation.job import Job, jobs_of
from lab.simulation.settings import Settings
from lab.trace.enough import found_tokens
from lab.trace.requests import Trace, jittered


class Outcome(Struct, frozen=True, kw_only=True):
    hit_rate: float  # 1 - tokens computed / tokens of all prompts
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    token_imbalance: float  # tokens computed by the busiest replica, as a multiple of the mean
    request_imbalance: float
    brought_rate: float = 0  # tokens brought from elsewhere / tokens of all prompts; all of them are hits
    refused: float = 0  # requests that waited for room in vain
    session_mean_s: float | None = None  # from a session's arrival to its last token; None: the trace names no sessions
    session_p99_s: float | None = None
    utilization: float  # share of prefill in the time until the last first token


def outcome_of(jobs: Sequence[Job], replicas: int, prefill_tokens_per_s: float) -> Outcome:
    """Summarize a run. Refused requests are counted, and in no other figure; raise ValueError if all are refused."""
    everybody, jobs = len(jobs), [job for job in jobs if not job.is_refused]
    if not jobs:
        raise ValueError(f"all {everybody:,} requests waited for room until their time-out")
    asked = sum(job.request.input_tokens for job in jobs)
    computed = [0] * replicas
    requests = [0] * replicas
    for job in jobs:
        computed[job.replica] += job.uncached_tokens
        requests[job.replica] += 1
        if job.prefill is not None:
            computed[job.prefill.replica] += job.prefill.uncached_tokens
    ttfts_s = sorted(job.ttft_s for job in jobs)
    sessions: dict[str, list[float]] = {}  # each one's beginning and end
    for job in jobs:
        if job.request.session is not None and job.ended_s:
            span = sessions.setdefault(job.request.session, [job.request.at_s, 0.0])
            span[1] = max(span[1], job.ended_s)
    sessions_s = sorted(ended_s - began_s for began_s, ended_s in sessions.values())
    span_s = max(job.first_s for job in jobs) - min(job.request.at_s for job in jobs)
    return Outcome(
        hit_rate=1 - sum(computed) / asked,
        brought_rate=sum(sum(job.brought_tokens.values()) for job in jobs) / asked,
        ttft_mean_s=fmean(ttfts_s),
        ttft_p50_s=percentile(ttfts_s, 0.5),
        ttft_p90_s=percentile(ttfts_s, 0.9),
        ttft_p99_s=percentile(ttfts_s, 0.99),
        token_imbalance=_imbalance(computed),
        request_imbalance=_imbalance(requests),
        refused=everybody - len(jobs),
        session_mean_s=fmean(sessions_s) if sessions_s else None,
        session_p99_s=percentile(sessions_s, 0.99) if sessions_s else None,
        utilization=sum(computed) / (prefill_tokens_per_s * replicas * span_s) if span_s else 1.0,
    )


def mean_of(outcomes: Sequence[Outcome]) -> Outcome:
    each: dict[str, list[Any]] = {name: [getattr(one, name) for one in outcomes] for name in Outcome.__struct_fields__}
    means: dict[str, Any] = {name: None if None in values else fmean(values) for name, values in each.items()}
    return Outcome(**means)


def _imbalance(loads: Iterable[int]) -> float:
    each = list(loads)
    mean = fmean(each)
    return max(each) / mean if mean else 1.0


class Row(Struct, frozen=True):
    """Results of one policy or bound."""

    name: str
    is_bound: bool
    mean: Outcome
    runs: list[Outcome]


def pooled(trace: Trace, settings: Settings, on_request: Callable[[], None] = lambda: None) -> list[Job]:
    """Simulate one cache as large as all together, one queue, and one parallel prefill per replica."""
    one = replace(
        settings,
        replicas=1,
        prefill_replicas=0,
        servers=settings.replicas,
        capacity_tokens=settings.capacity_tokens * settings.replicas,
        host_tokens=settings.host_tokens * settings.replicas,
        disk_tokens=settings.disk_tokens * settings.replicas,
        model="fifo",
        routers=1,
        replica_limit=0,
    )
    return simulated(trace, one, "round-robin", 0, on_request)


def ideal(trace: Trace, settings: Settings, on_request: Callable[[], None] = lambda: None) -> list[Job]:
    """Simulate a cache that keeps every block for ever from its first request on, with the queue of `pooled`."""
    ready_s = [0.0] * settings.replicas
    jobs = list(jobs_of(trace))
    for job, found in zip(jobs, found_tokens(trace), strict=True):
        job.uncached_tokens = job.request.input_tokens - found
        job.first_s = max(job.request.at_s, ready_s[0]) + job.uncached_tokens / settings.prefill_tokens_per_s
        heapreplace(ready_s, job.first_s)
        on_request()
    return jobs


BOUNDS = {"pooled": pooled, "ideal": ideal}


def compared(
    trace: Trace,
    settings: Settings,
    policies: Sequence[str],
    *,
    seeds: int = 1,
    jitter_s: float = 0.0,
    bounds: bool = True,
    on_request: Callable[[], None] = lambda: None,
) -> list[Row]:
    paced = [jittered(trace, jitter_s, seed) for seed in range(seeds)]
    rows = []
    for policy in policies:
        runs = [simulated(one, settings, policy, seed, on_request) for seed, one in enumerate(paced)]
        rows.append(_row(policy, runs, settings.replicas, settings.prefill_tokens_per_s))
    for name, bound in BOUNDS.items() if bounds else ():
        if name == "ideal" and settings.closed_loop:
            continue  # it takes arrivals from the trace
        runs = [bound(one, settings, on_request) for one in paced]
        rows.append(_row(name, runs, 1, settings.prefill_tokens_per_s * settings.replicas, is_bound=True))
    return rows


def _row(name: str, runs: list[list[Job]], replicas: int, rate: float, *, is_bound: bool = False) -> Row:
    outcomes = [outcome_of(jobs, replicas, rate) for jobs in runs]
    return Row(name, is_bound, mean_of(outcomes), outcomes)
