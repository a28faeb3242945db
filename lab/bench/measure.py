"""A whole measurement: probes the endpoints, runs the rounds in turn, and sums up."""

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, NamedTuple, TypeVar

import msgspec
import uvloop

from lab.bench.client import Endpoint
from lab.bench.figures import compare, figures
from lab.bench.load import Limits, LoadGenerator, RunResult
from lab.bench.outcome import Outcome
from lab.bench.probe import Probe, Ready, RequestSettings, probe
from lab.bench.result import FORMAT, EndpointResult, Result, machine, warnings
from lab.bench.words import Words
from lab.bench.workloads import Arrival
from router.members.broken import Broken
from router.members.spec import Target
from router.responses import ReplicaList

Found = TypeVar("Found")
PATIENCE_S = 2.0  # a question beside the measurement may take so long
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Plan(NamedTuple):
    targets: Sequence[Target]  # one, or two to compare
    models: Sequence[str | None]
    wish: RequestSettings
    arrivals: Callable[[str], Iterator[Arrival]]  # by seed
    limits: Limits
    rounds: int = 1
    other_words: bool = False  # for the second endpoint
    key: str | None = None
    timeout_s: float = 600.0


class Measured(NamedTuple):
    """`ran`: by endpoint, round by round; those of the last round may be missing."""

    began: datetime
    probes: list[Probe]
    ran: list[list[RunResult]]
    interrupted: bool
    idle: list[dict[str, str | None]]  # each endpoint has a row: its replicas without work now, and why


class Stop:
    """Handles Ctrl-C: ends the current load, or whatever runs before the first one."""

    def __init__(self) -> None:
        self.load: LoadGenerator | None = None
        self.was_asked = False
        self.task: asyncio.Task[Any] | None = None
        self.failure: BaseException | None = None

    def __call__(self) -> None:
        self.was_asked = True
        if self.load is not None:
            self.load.interrupt()
        elif self.task is not None:
            self.task.cancel()

    def failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Stop for an exception in a callback; otherwise it would only be logged, and its request waited for."""
        error = context.get("exception")
        if isinstance(error, BaseException):
            self.failure = self.failure or error
            self()
        else:
            loop.default_exception_handler(context)


OnLoad = Callable[[LoadGenerator, Target, int], object]  # with the number of the round


def measured(plan: Plan, on_load: OnLoad) -> Measured:
    """KeyboardInterrupt if Ctrl-C came before anything was measured; CannotAsk of an endpoint that cannot be asked."""
    stop = Stop()
    try:
        return uvloop.run(_guarded(stop, _measure(plan, stop, on_load)))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _guarded(stop: Stop, work: Coroutine[Any, Any, Found]) -> Found:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(stop.failed)
    task: asyncio.Task[Found] = loop.create_task(work)
    stop.task = task
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def signalled() -> None:  # a second signal kills the process
        for number in SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        stop()

    for number in SIGNALS:
        loop.add_signal_handler(number, signalled)
    try:
        return await task
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
        if stop.failure is not None:
            raise stop.failure


async def _measure(plan: Plan, stop: Stop, on_load: OnLoad) -> Measured:
    began = datetime.now(UTC)
    endpoints = [Endpoint(target, plan.key, plan.timeout_s) for target in plan.targets]
    try:
        ready = [
            await probe(endpoint, plan.wish._replace(model=model))
            for endpoint, model in zip(endpoints, plan.models, strict=True)
        ]
        ran: list[list[RunResult]] = [[] for _ in endpoints]
        for number in range(plan.rounds):
            order = range(len(endpoints))
            for which in reversed(order) if number % 2 else order:  # so that slow changes affect both alike
                if stop.was_asked:
                    break
                load = LoadGenerator(endpoints[which], *_round(plan, ready, which, number), plan.limits)
                on_load(load, plan.targets[which], number)
                stop.load = load
                ran[which].append(await load.run())
                stop.load = None
        idle = [await _idle(endpoint) for endpoint in endpoints]
        return Measured(began, [each.probe for each in ready], ran, stop.was_asked, idle)
    finally:
        for endpoint in endpoints:
            endpoint.close()


async def _idle(endpoint: Endpoint) -> dict[str, str | None]:
    """Ask a router of ours which replicas have no work, and why; empty for other endpoints."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            _, body = await endpoint.fetch("GET", "/replicas")
        replicas = msgspec.json.decode(body, type=ReplicaList).replicas
    except (TimeoutError, Broken, msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return {one.name: one.idle for one in replicas if not one.load.in_flight}


def _round(plan: Plan, ready: Sequence[Ready], which: int, number: int) -> tuple[Any, Iterator[Arrival]]:
    """The form and the requests: others in each round, in the same round the same for both."""
    seed = f"{plan.wish.seed}, round {number}"
    words_seed = f"{seed}, second" if plan.other_words and which else seed
    form = ready[which].form
    words = Words(words_seed, ready[0].probe.tokens_per_word)  # of the first for both, or they would be others
    return form._replace(words=words), plan.arrivals(seed)


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


def outcomes_of(found: Measured) -> list[tuple[int, int, Outcome]]:
    """Each with the number of its endpoint and of its round."""
    return [
        (which, number, outcome)
        for which, ran in enumerate(found.ran)
        for number, one in enumerate(ran)
        for outcome in one.outcomes
    ]
