"""Several policies and the bounds on the same traffic, once per seed.

No routing can beat the bounds: the whole fleet's cache in one place, and an infinite cache.
"""

from collections.abc import Callable, Sequence
from heapq import heapreplace

from msgspec import Struct
from msgspec.structs import replace

from lab.simulation.fleet import simulated
from lab.simulation.job import Job, jobs_of
from lab.simulation.outcome import Outcome, mean_of, outcome_of
from lab.simulation.settings import Settings
from lab.trace.enough import found_tokens
from lab.trace.requests import Trace
from lab.trace.shaping import jittered


class Row(Struct, frozen=True):
    """Results of one policy or bound; `ttft_s` has the sorted times of all runs together."""

    name: str
    is_bound: bool
    mean: Outcome
    runs: list[Outcome]
    ttft_s: list[float]


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
    """Simulate each policy, and each bound, on the same arrivals."""
    paced = [jittered(trace, jitter_s, seed) for seed in range(seeds)]
    rows = []
    for policy in policies:
        runs = [simulated(one, settings, policy, seed, on_request) for seed, one in enumerate(paced)]
        rows.append(_row(policy, runs, settings.replicas, settings.prefill_tokens_per_s))
    for name, bound in BOUNDS.items() if bounds else ():
        runs = [bound(one, settings, on_request) for one in paced]
        rows.append(_row(name, runs, 1, settings.prefill_tokens_per_s * settings.replicas, is_bound=True))
    return rows


def _row(name: str, runs: list[list[Job]], replicas: int, rate: float, *, is_bound: bool = False) -> Row:
    outcomes = [outcome_of(jobs, replicas, rate) for jobs in runs]
    times = sorted(job.ttft_s for jobs in runs for job in jobs if not job.is_refused)
    return Row(name, is_bound, mean_of(outcomes), outcomes, times)
