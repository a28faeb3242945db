"""A whole measurement: probes the endpoints, runs the rounds in turn, and sums up."""

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, NamedTuple

import uvloop

from lab.bench.client import Endpoint
from lab.bench.figures import FORMAT, EndpointResult, Result, compare, figures, machine, warnings
from lab.bench.load import Limits, LoadGenerator, RunResult
from lab.bench.probe import Probe, RequestSettings, probe
from lab.bench.prompts import Words
from lab.bench.workloads import Arrival
from router.members.spec import Target


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
        return Measured(began, [each for _, each in ready], ran, interrupted)
    finally:
        for endpoint in endpoints:
            endpoint.close()


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
        )
        for target, each, ran in zip(plan.targets, found.probes, found.ran, strict=True)
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
