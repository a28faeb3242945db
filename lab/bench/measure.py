"""A whole measurement: probes the endpoints, runs the rounds in turn, and sums up."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, NamedTuple

import msgspec
import uvloop

from lab.bench.client import Endpoint
from lab.bench.figures import FORMAT, EndpointResult, Result, compare, figures, machine, warnings
from lab.bench.load import Limits, LoadGenerator, RunResult
from lab.bench.probe import Probe, RequestSettings, probe
from lab.bench.words import Words
from lab.bench.workloads import Arrival
from router.members.broken import Broken
from router.members.spec import Target
from router.responses import ReplicaList

PATIENCE_S = 2.0  # a question beside the measurement may take so long


class Plan(NamedTuple):
    targets: Sequence[Target]  # one, or two to compare
    wish: RequestSettings
    arrivals: Callable[[str], Iterator[Arrival]]  # arrivals for a seed
    limits: Limits
    rounds: int = 1
    key: str | None = None
    timeout_s: float = 600.0


class Measured(NamedTuple):
    """`ran`: by endpoint, round by round; those of the last round may be missing."""

    began: datetime
    probes: list[Probe]
    ran: list[list[RunResult]]
    interrupted: bool
    idle: list[dict[str, str | None]]  # each endpoint has a row: its replicas without work now, and why


OnLoad = Callable[[LoadGenerator, Target, int], object]  # the last argument is the number of the round


def measured(plan: Plan, on_load: OnLoad) -> Measured:
    """KeyboardInterrupt if Ctrl-C came before anything was measured; CannotAsk of an endpoint that cannot be asked."""
    return uvloop.run(_measure(plan, on_load))


async def _measure(plan: Plan, on_load: OnLoad) -> Measured:
    began = datetime.now(UTC)
    endpoints = [Endpoint(target, plan.key, plan.timeout_s) for target in plan.targets]
    try:
        ready = [await probe(endpoint, plan.wish) for endpoint in endpoints]
        ran: list[list[RunResult]] = [[] for _ in endpoints]
        order = list(range(len(endpoints)))
        # Every second round goes the other way round, so that slow changes affect both alike.
        turns = [(number, which) for number in range(plan.rounds) for which in order[:: -1 if number % 2 else 1]]
        interrupted = False
        for number, which in turns:
            seed = f"{plan.wish.seed}, round {number}"  # the second endpoint is told other words of the same lengths
            words = Words(f"{seed}, second" if which else seed, ready[0][1].tokens_per_word)
            form = ready[which][0]._replace(words=words)
            load = LoadGenerator(endpoints[which], form, plan.arrivals(seed), plan.limits)
            on_load(load, plan.targets[which], number)
            ran[which].append(await load.run())
            if interrupted := ran[which][-1].was_interrupted:
                break
        idle = [await _idle(endpoint) for endpoint in endpoints]
        return Measured(began, [each for _, each in ready], ran, interrupted, idle)
    finally:
        for endpoint in endpoints:
            endpoint.close()


async def _idle(endpoint: Endpoint) -> dict[str, str | None]:
    """Ask a router of ours which replicas have no work, and why; empty for other endpoints."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            answer = await endpoint.get("/replicas")
        replicas = msgspec.json.decode(answer.body, type=ReplicaList).replicas
    except (TimeoutError, Broken, msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return {one.name: one.idle for one in replicas if not one.load.in_flight}


# ---- summing up


def summed_up(plan: Plan, found: Measured, settings: dict[str, Any]) -> Result:
    endpoints = [
        EndpointResult(
            url=target.url,
            probe=each,
            figures=figures([one.outcomes for one in ran]),
            rounds=[figures([one.outcomes]) for one in ran],
            own=[one.own for one in ran],
            unfinished=sum(one.unfinished for one in ran),
            idle={
                name: why
                for name, why in idle.items()
                if all(name != one.replica for run in ran for one in run.outcomes)
            },
        )
        for target, each, ran, idle in zip(plan.targets, found.probes, found.ran, found.idle, strict=True)
    ]
    finished = []  # the figures of the rounds that both endpoints finished
    if len(endpoints) > 1:
        for number, ran in enumerate(zip(*found.ran, strict=False)):
            if not any(one.was_interrupted for one in ran):
                finished.append((endpoints[0].rounds[number], endpoints[1].rounds[number]))
    return Result(
        format=FORMAT,
        version=version("warmroute"),
        machine=machine(),
        began=found.began.isoformat(timespec="seconds"),
        settings=settings,
        interrupted=found.interrupted,
        endpoints=endpoints,
        comparison=compare(finished),
        warnings=[f"{one.url}: {text}" for one in endpoints if one.own for text in warnings(one)],
    )
