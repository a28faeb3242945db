"""Silence is not death: replicas, a network and a machine that stand still for a while break no stream off."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from typing import NamedTuple

import httpx2
import pytest

from tests.chaos.nodes import network, no_nodes
from tests.chaos.routers import Fleet, RouterProcess, fleet, http_client, router
from tests.chaos.streams import PACE, Told, all_streams, check_same, resumes_of, stream, streams_halfway

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

REPLICAS = 3
QUEUE_TIMEOUT_S = 30.0
NEW_EVERY_S = 0.5
BACK_WITHIN_S = 6.0
QUIET = ("--log-level", "error")


class Outcome(NamedTuple):
    told: list[Told]  # what was streamed
    new: list[Told]  # what was asked meanwhile
    took_s: float
    after_s: float  # from the end of the fault until the last stream and request ended


async def new_requests(http: httpx2.AsyncClient, over: asyncio.Event) -> list[Told]:
    asked: list[asyncio.Task[Told]] = []
    while not over.is_set():
        asked.append(asyncio.create_task(stream(http, 1000 + len(asked), max_tokens=3)))
        await asyncio.sleep(NEW_EVERY_S)
    return await asyncio.gather(*asked)


async def through(
    fault: AbstractContextManager[None], lasts_s: float, http: httpx2.AsyncClient, undisturbed: list[Told]
) -> Outcome:
    """64 streams, a fault in their midst, and new requests while it lasts: all are answered as if nothing had been."""
    over = asyncio.Event()
    began_s = time.monotonic()
    streams = await streams_halfway(http)
    with fault:
        new = asyncio.create_task(new_requests(http, over))
        await asyncio.sleep(lasts_s)
    ended_s = time.monotonic()
    over.set()
    outcome = Outcome(await streams, await new, time.monotonic() - began_s, time.monotonic() - ended_s)
    check_same(outcome.told, undisturbed)
    assert [one.status for one in outcome.new] == [200] * len(outcome.new)
    assert not any(b'"error"' in one.body for one in outcome.new)
    assert max(one.took_s for one in outcome.new) < QUEUE_TIMEOUT_S
    return outcome


def say(what: str, outcome: Outcome, served: RouterProcess) -> None:
    longest_s = max(one.longest_pause_s for one in outcome.told)
    print(
        f"{what}: {len(outcome.told)} streams whole, {len(outcome.new)} new requests answered, longest pause "
        f"{longest_s:.1f} s, all done {outcome.after_s:.1f} s after its end; {dict(resumes_of(served))}"
    )


@asynccontextmanager
async def at_work() -> AsyncIterator[tuple[Fleet, RouterProcess, httpx2.AsyncClient, list[Told]]]:
    with fleet(REPLICAS, *PACE) as replicas, router(*replicas.as_options, *QUIET) as served:
        async with http_client(served.url, QUEUE_TIMEOUT_S) as http:
            yield replicas, served, http, await all_streams(http)


# ---- processes that stand still


@contextmanager
def stopped(replicas: Fleet, *others: int) -> Iterator[None]:
    for number in range(len(replicas)):
        replicas.signal(number, signal.SIGSTOP)
    for pid in others:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in others:
            os.kill(pid, signal.SIGCONT)
        for number in range(len(replicas)):
            replicas.signal(number, signal.SIGCONT)


@pytest.mark.chaos
@pytest.mark.timeout(120)
@pytest.mark.parametrize("routers", [pytest.param(0, marks=pytest.mark.grid), 1])
async def test_replicas_that_all_stop_for_a_while_break_nothing_off(routers: int) -> None:
    async with at_work() as (replicas, served, http, undisturbed):
        outcome = await through(stopped(replicas, *[served.process.pid][:routers]), 6.0, http, undisturbed)
        say(f"every replica{' and the router' * routers} stopped for 6 s", outcome, served)
        assert outcome.after_s < BACK_WITHIN_S


# ---- a network that is cut


@pytest.mark.chaos
@pytest.mark.timeout(180)
@pytest.mark.skipif(no_nodes() is not None, reason=str(no_nodes()))
@pytest.mark.parametrize("lasts_s", [5, *(pytest.param(each, marks=pytest.mark.grid) for each in (1.5, 15))])
async def test_a_network_that_is_cut_for_a_while_breaks_nothing_off(lasts_s: float) -> None:
    with (
        network(2) as (far, near),
        far.inside(),
        fleet(REPLICAS, *PACE, host=far.address) as replicas,
        near.inside(),
        router(*replicas.as_options, *QUIET) as served,
    ):
        async with http_client(served.url, QUEUE_TIMEOUT_S) as http:
            undisturbed = await all_streams(http)
            outcome = await through(near.unplugged(), lasts_s, http, undisturbed)
            say(f"network cut for {lasts_s:g} s", outcome, served)
            assert outcome.after_s < BACK_WITHIN_S
            states = [one["state"] for one in served.get("/replicas").json["replicas"]]
            assert states == ["exact"] * REPLICAS  # events flow again, too


# ---- a machine that is too busy


@contextmanager
def starved(processes: int = 16) -> Iterator[None]:
    """Others take nearly all of the processors' time."""
    nice = ["nice", "-n", "-5"] if os.geteuid() == 0 else []
    hogs = [subprocess.Popen([*nice, sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


@pytest.mark.grid  # it takes all of the processors' time, which no test beside it would survive
@pytest.mark.timeout(180)
async def test_a_machine_that_is_too_busy_breaks_nothing_off() -> None:
    async with at_work() as (_, served, http, undisturbed):
        outcome = await through(starved(), 12.0, http, undisturbed)
        say("machine starved for 12 s", outcome, served)
