"""A real fleet of simulated replicas behind a real router, with some conversations over."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from tests.browser.traffic import ask
from tests.chaos.replicas import can_bind, free_ports
from tests.chaos.routers import Fleet, RouterProcess, fleet, router
from tests.chaos.test_stream_chaos import Peer

REPLICAS = 3
LOSSY = 2
TALKS = 8
OPTIONS = (
    *("--num-blocks", 1400, "--max-model-len", 20_480, "--set=simulated_mean_output_tokens=0"),
    *("--set=simulated_prefill_tokens_per_s=40_000", "--set=simulated_decode_tokens_per_s=100"),
)


class World(NamedTuple):
    replicas: Fleet
    lossy: Peer  # what r2's events come through
    options: list[str]  # of a router
    router: RouterProcess

    @property
    def url(self) -> str:
        return self.router.url


@contextmanager
def losing(upstream: str) -> Iterator[Peer]:
    proxy = Peer("proxy", {"upstream": upstream, "loss": 0.0, "seed": 1})
    try:
        yield proxy
    finally:
        proxy.end()


@contextmanager
def begun(count: int = REPLICAS, talks: int = TALKS, options: tuple[object, ...] = OPTIONS) -> Iterator[World]:
    with ExitStack() as stack:
        replicas = stack.enter_context(fleet(count, *options))
        ends = replicas[LOSSY].load()["endpoints"]
        lossy = stack.enter_context(losing(ends["events"]))
        ends["events"] = lossy.ask()["endpoint"]
        through = ",".join(f"{name}={end}" for name, end in ends.items() if end)
        of_router = replicas.as_options
        of_router[2 * LOSSY + 1] += f",engine=warmroute,{through}"
        running = stack.enter_context(router(*of_router))
        talk(running.url, talks)
        yield World(replicas, lossy, of_router, running)


def talk(url: str, talks: int, **how: Any) -> None:
    """On a thread of its own, as Playwright has the event loop of this one."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(lambda: asyncio.run(ask(url, talks, **how))).result()


def lose_events(world: World, seed: int) -> None:
    """r2 is asked, beside the router, while nothing of its events arrives; then something arrives again."""
    url = world.replicas[LOSSY].url
    try:
        world.lossy.ask("loss", 1.0)
        talk(url, 1, seed=seed, turns=1)
    finally:
        world.lossy.ask("loss", 0.0)
    talk(url, 1, seed=seed + 1, turns=1)


@contextmanager
def another_router(world: World, *options: object, **how: Any) -> Iterator[RouterProcess]:
    """Before the same replicas, with options of its own."""
    with router(*world.options, *options, **how) as running:
        yield running


def steady_port() -> int:
    """One that stays free while its owner is away."""
    port = free_ports(1)
    assert can_bind(port)
    return port
