"""Results of a run: hit rate, times to first token, balance."""

from collections.abc import Iterable, Sequence
from statistics import fmean

from msgspec import Struct

from lab.percentiles import percentile
from lab.simulation.job import Job


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
        utilization=sum(computed) / (prefill_tokens_per_s * replicas * span_s) if span_s else 1.0,
    )


def mean_of(outcomes: Sequence[Outcome]) -> Outcome:
    return Outcome(**{name: fmean(getattr(one, name) for one in outcomes) for name in Outcome.__struct_fields__})


def _imbalance(loads: Iterable[int]) -> float:
    each = list(loads)
    mean = fmean(each)
    return max(each) / mean if mean else 1.0
