"""Runs policies and bounds on the same arrivals, and sums up: hit rate, times to first token, balance."""

from collections.abc import Callable, Iterator, Sequence
from heapq import heapreplace
from statistics import fmean
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict, replace

from lab.percentiles import percentile
from lab.simulation.fleet import simulated
from lab.simulation.job import Job, jobs_of
from lab.simulation.settings import Settings
from lab.trace.requests import Trace, found_tokens, jittered
from lab.writing import aligned


class Outcome(Struct, frozen=True, kw_only=True):
    hit_rate: float  # 1 - tokens computed / tokens of all prompts
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    token_imbalance: float  # tokens computed by the busiest replica, as a multiple of the mean
    request_imbalance: float
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
    sessions: dict[str, list[float]] = {}  # each one's beginning and end
    for job in jobs:
        computed[job.replica] += job.uncached_tokens
        requests[job.replica] += 1
        if job.request.session is not None and job.ended_s:
            span = sessions.setdefault(job.request.session, [job.request.at_s, 0.0])
            span[1] = max(span[1], job.ended_s)
    ttfts_s = sorted(job.ttft_s for job in jobs)
    sessions_s = sorted(ended_s - began_s for began_s, ended_s in sessions.values())
    span_s = max(job.first_s for job in jobs) - min(job.request.at_s for job in jobs)
    return Outcome(
        hit_rate=1 - sum(computed) / asked,
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


def _imbalance(loads: Sequence[int]) -> float:
    return max(loads) / fmean(loads) if any(loads) else 1.0


class Row(Struct, frozen=True):
    """Results of one policy or bound."""

    name: str
    is_bound: bool
    mean: Outcome
    runs: list[Outcome]


def pooled(trace: Trace, settings: Settings, on_request: Callable[[], None] = lambda: None) -> list[Job]:
    """Simulate one cache as large as all together, one queue, and one parallel prefill per replica."""
    tokens = settings.capacity_tokens * settings.replicas
    one = replace(settings, replicas=1, servers=settings.replicas, capacity_tokens=tokens, replica_limit=0)
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
    each: dict[str, list[Any]] = {
        field: [getattr(one, field) for one in outcomes] for field in Outcome.__struct_fields__
    }
    means: dict[str, Any] = {field: None if None in values else fmean(values) for field, values in each.items()}
    return Row(name, is_bound, Outcome(**means), outcomes)


# ---- as text and as JSON


def duration(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 0.1 else f"{seconds * 1000:,.0f} ms"


def lines(trace: Trace, settings: Settings, rows: Sequence[Row]) -> Iterator[str]:
    rate = settings.prefill_tokens_per_s
    asked = trace.input_tokens / trace.span_s if trace.span_s else float("inf")
    yield (
        f"{trace.name}: {len(trace.requests):,} requests, {trace.input_tokens:,} input tokens in blocks of "
        f"{trace.block_tokens:,}, within {trace.span_s:,.0f} s"
    )
    yield (
        f"{settings.replicas} replicas, each {settings.capacity_tokens:,} tokens of cache and {rate:,.0f} prefill "
        f"tokens/s: load {asked / (settings.replicas * rate):.2f}"
    )
    yield ""
    table = [["policy", "hits", "TTFT mean", "p50", "p90", "p99", "session", "p99", "tokens", "requests", "busy"]]
    for row in rows:
        one = row.mean
        times = map(duration, (one.ttft_mean_s, one.ttft_p50_s, one.ttft_p90_s, one.ttft_p99_s))
        sessions = ("" if time_s is None else f"{time_s:,.0f} s" for time_s in (one.session_mean_s, one.session_p99_s))
        balance = ("" if row.is_bound else f"{ratio:.2f}" for ratio in (one.token_imbalance, one.request_imbalance))
        if row.name == "pooled":  # the first of the bounds
            table.append([])
        table.append([row.name, f"{one.hit_rate:.1%}", *times, *sessions, *balance, f"{one.utilization:.0%}"])
    # An open loop gives a turn its time, so it shows no sessions.
    yield from aligned(row if settings.closed_loop else row[:6] + row[8:] for row in table)
    for row in rows:
        if row.mean.refused:
            yield f"{row.name}: {row.mean.refused:,.0f} requests waited for room in vain; they are in no other figure."
    if len(rows[0].runs) > 1:
        means = {row.name: [one.ttft_mean_s for one in row.runs] for row in rows}
        spreads = [(max(own) / min(own) - 1, name) for name, own in means.items() if min(own) > 0]
        yield ""
        yield f"Each figure is the mean of {len(rows[0].runs)} runs." + (
            f" The means of TTFT differ most for {max(spreads)[1]}: by {max(spreads)[0]:.1%}." if spreads else ""
        )


def as_json(trace: Trace, settings: Settings, rows: Sequence[Row]) -> dict[str, Any]:
    policies, bounds = (
        {row.name: {**asdict(row.mean), "runs": row.runs} for row in rows if row.is_bound is is_bound}
        for is_bound in (False, True)
    )
    return {
        "trace": {
            "name": trace.name,
            "requests": len(trace.requests),
            "input_tokens": trace.input_tokens,
            "block_tokens": trace.block_tokens,
            "span_s": trace.span_s,
        },
        "settings": settings,
        "policies": policies,
        "bounds": bounds,
    }
