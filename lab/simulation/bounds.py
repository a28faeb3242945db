"""Bounds that no routing can beat: the whole fleet's cache in one place, and an infinite cache."""

from collections.abc import Callable
from heapq import heapreplace
from itertools import takewhile

from msgspec.structs import replace

from lab.simulation.fleet import simulated
from lab.simulation.job import Job, jobs_of
from lab.simulation.settings import Settings
from lab.trace.requests import Trace


def pooled(trace: Trace, settings: Settings, on_request: Callable[[], None] = lambda: None) -> list[Job]:
    """Simulate one cache as large as all together, one queue, and one parallel prefill per replica."""
    one = replace(
        settings,
        replicas=1,
        servers=settings.replicas,
        capacity_tokens=settings.capacity_tokens * settings.replicas,
        model="fifo",
        routers=1,
        replica_limit=0,
    )
    return simulated(trace, one, "round-robin", 0, on_request)


def ideal(trace: Trace, settings: Settings, on_request: Callable[[], None] = lambda: None) -> list[Job]:
    """Simulate a cache that keeps every block for ever from its first request on, with the queue of `pooled`."""
    size, rate = trace.block_tokens, settings.prefill_tokens_per_s
    seen: set[int] = set()
    ready_s = [0.0] * settings.replicas
    jobs = list(jobs_of(trace))
    for job in jobs:
        request = job.request
        matched = sum(1 for _ in takewhile(seen.__contains__, request.blocks[: (request.input_tokens - 1) // size]))
        seen.update(request.blocks[: job.prompt.full])
        job.uncached_tokens = request.input_tokens - matched * size
        job.first_s = max(request.at_s, ready_s[0]) + job.uncached_tokens / rate
        heapreplace(ready_s, job.first_s)
        on_request()
    return jobs
