"""A whole measurement: probes the endpoint, runs the load, and sums up."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, NamedTuple

import uvloop

from lab.bench.client import Endpoint
from lab.bench.figures import FORMAT, EndpointResult, Result, figures, machine, warnings
from lab.bench.load import Limits, LoadGenerator, RunResult
from lab.bench.probe import Probe, RequestSettings, probe
from lab.bench.prompts import Words
from lab.bench.workloads import Arrival
from router.members.spec import Target


class Plan(NamedTuple):
    target: Target
    wish: RequestSettings
    arrivals: Callable[[str], Iterator[Arrival]]  # arrivals for a seed
    limits: Limits
    key: str | None = None
    timeout_s: float = 600.0


class Measured(NamedTuple):
    began: datetime
    probe: Probe
    ran: RunResult


def measured(plan: Plan, on_end: Callable[[int], object] = lambda _: None) -> Measured:
    """`on_end` is told how many requests have ended, first none.

    KeyboardInterrupt if Ctrl-C came before anything was measured; CannotAsk of an endpoint that cannot be asked.
    """
    return uvloop.run(_measure(plan, on_end))


async def _measure(plan: Plan, on_end: Callable[[int], object]) -> Measured:
    began, endpoint = datetime.now(UTC), Endpoint(plan.target, plan.key, plan.timeout_s)
    try:
        form, probed = await probe(endpoint, plan.wish)
        seed = f"{plan.wish.seed}, round 0"
        words = Words(seed, probed.tokens_per_word)
        load = LoadGenerator(endpoint, form._replace(words=words), plan.arrivals(seed), plan.limits, on_end)
        return Measured(began, probed, await load.run())
    finally:
        endpoint.close()


# ---- summing up


def summed_up(plan: Plan, found: Measured, settings: dict[str, Any]) -> Result:
    ran = found.ran
    endpoint = EndpointResult(plan.target.url, found.probe, figures(ran.outcomes), [ran.own], ran.unfinished)
    return Result(
        format=FORMAT,
        version=version("warmroute"),
        machine=machine(),
        began=found.began.isoformat(timespec="seconds"),
        settings=settings,
        interrupted=ran.was_interrupted,
        endpoints=[endpoint],
        warnings=[f"{endpoint.url}: {text}" for text in warnings(endpoint)],
    )
