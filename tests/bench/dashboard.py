"""Measure the dashboard's cost: to concurrent requests, and to the router of a large fleet.

`python -m tests.bench.dashboard URL URL` runs a router with a filled index in a process of its own. Linux only: it
reads /proc.
"""

import asyncio
import contextlib
import gc
import http.client
import json
import logging
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import uvloop

from router.config import RouterConfig
from router.core import Router
from router.dashboard import static_files
from router.dashboard.broadcast import FeedQuery, Subscriber
from router.dashboard.rows import Query
from router.dashboard.sampling import EVERY_S
from router.http.app import dashboard_of
from router.http.explaining import explained
from router.members.spec import ReplicaSpec
from router.placement.cost import Question
from router.placement.index import APPROXIMATE
from router.process.front import Front
from router.prompts.prompt import read_peek
from router.proxy.request_summary import PastDecision
from router.responses import DecisionRecord
from router.tenants.admission import Admitted
from tests.bench.front import FrontOnWires
from tests.bench.measure import heading, row
from tests.bench.prefixes import ENTRIES, TICK_S, fleet, longest_stall_s
from tests.bench.router import CLIENTS, MODEL, PLAIN, as_http, ask_all, workers
from tests.bench.tokens import ROOT
from tests.chaos.replicas import cpu_s
from tests.events.processes import wait_until

REPLICAS = 100
REQUESTS = 6000
WINDOW_S = 10.0
MESSAGE = "word " * 160
TARGET_MS = "<= 200 ms"
PROMPT_WORDS = 10_000
SHAPES = 64  # watchers that all ask for something else


def run(rounds: int) -> None:
    _beside_requests(rounds)
    logging.disable(logging.WARNING)
    uvloop.run(_answering(rounds))
    logging.disable(logging.NOTSET)


# ---- beside requests


def _beside_requests(rounds: int) -> None:
    heading(f"{REPLICAS} replicas, {ENTRIES:,} entries in the index, {CLIENTS} connections")
    with ExitStack() as stack:
        urls = [f"http://127.0.0.1:{one.http}" for one in stack.enter_context(workers())]
        pid, port = stack.enter_context(router_process(*urls))
        chance = random.Random(1)
        asked_ms(pid, port, chance)  # warms up
        alone: list[float] = []
        watched: list[float] = []
        for number in range(rounds):
            for open_page in (False, True) if number % 2 else (True, False):
                with watching(port) if open_page else contextlib.nullcontext():
                    (watched if open_page else alone).append(asked_ms(pid, port, chance))
        row("CPU per 1,000 requests, no viewers", alone, "ms")
        row("CPU per 1,000 requests, a dashboard is open", watched, "ms")
        ratios = [one / other for one, other in zip(watched, alone, strict=True)]
        row("one dashboard / no viewers", ratios, "times", "< 1.05")
        row("CPU without requests, no viewers", idle_percent(pid, rounds), "% of a core")
        with watching(port):
            row("CPU without requests, a dashboard is open", idle_percent(pid, rounds), "% of a core")
    print()


def asked_ms(pid: int, port: int, chance: random.Random) -> float:
    """CPU milliseconds of the router per 1,000 requests."""
    bodies = [as_http([f"{chance.random()} {MESSAGE}"], stream=False) for _ in range(REQUESTS)]
    before_s, durations_s = cpu_s(pid), list[float]()
    uvloop.run(ask_all(port, iter(bodies), PLAIN, CLIENTS, durations_s))
    assert len(durations_s) == REQUESTS
    return (cpu_s(pid) - before_s) * 1e6 / REQUESTS


def idle_percent(pid: int, rounds: int) -> list[float]:
    figures = []
    for _ in range(rounds):
        before_s, began_s = cpu_s(pid), time.monotonic()
        time.sleep(WINDOW_S)
        figures.append((cpu_s(pid) - before_s) / (time.monotonic() - began_s) * 100)
    return figures


@contextmanager
def watching(port: int) -> Iterator[None]:
    """A page that reads every frame."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WINDOW_S)
    connection.request("GET", "/dashboard/feed")
    answer = connection.getresponse()
    assert answer.status == 200
    frames = 0

    def read() -> None:
        nonlocal frames
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException, AttributeError):
            while line := answer.readline():
                frames += line.startswith(b"event: fleet")

    reading = threading.Thread(target=read)
    reading.start()
    wait_until(lambda: frames, "the first frame has come")
    try:
        yield
    finally:
        assert connection.sock is not None
        connection.sock.shutdown(socket.SHUT_RDWR)
        reading.join()
        connection.close()


@contextmanager
def router_process(*urls: str) -> Iterator[tuple[int, int]]:
    command = [sys.executable, "-m", "tests.bench.dashboard", *urls]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdin is not None and process.stdout is not None
    try:
        yield process.pid, int(process.stdout.readline())
    finally:
        process.stdin.close()
        wait_until(lambda: process.poll() is not None, "the router ends with its stdin")
        process.stdout.close()


async def serve(urls: list[str]) -> None:
    specs = tuple(
        ReplicaSpec(name=f"replica-{number:03d}", url=urls[number % len(urls)], engine="vllm", model=MODEL)
        for number in range(REPLICAS)
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        front = Front(RouterConfig(replicas=specs, slow_start_s=0.0), listener)
        await front.start()
        try:
            router = front.router
            async with asyncio.timeout(60):
                while any(member.candidate.unavailable for member in router.members):
                    await asyncio.sleep(0.05)
            each = ENTRIES // REPLICAS
            for place, member in enumerate(router.members):
                router.placement.index.store(member.slot, range(place * each, (place + 1) * each))
            print(listener.getsockname()[1], flush=True)
            await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        finally:
            await front.drain(1.0)
            await front.close()


# ---- answers


async def _answering(rounds: int) -> None:
    front = fleet()
    router = front.router
    busy(router)
    dashboard = dashboard_of(router)
    await dashboard.sampling.sample()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)  # as a router has it
    member = next(iter(router.members))
    heading(f"{len(router.members):,} replicas, {ENTRIES:,} entries in the index")

    def shown(*queries: Query) -> Callable[[], Awaitable[Any]]:
        watchers = [Subscriber(FeedQuery(query, admin=True)) for query in queries]
        dashboard.broadcast._subscribers = set(watchers)
        return dashboard.broadcast._show_all

    async def first() -> bytes:
        dashboard.broadcast.alerts.forget()
        await shown(Query())()
        return b""

    async def replica() -> bytes:
        dashboard._kept = None
        return msgspec.json.encode(dashboard.replica(member, await dashboard.held_prefixes(member)))

    async def decision() -> bytes:
        return msgspec.json.encode(router.history.decisions[0].record())

    async def explain() -> bytes:
        return msgspec.json.encode(await explained(router, body, (), Admitted("bench")))

    async def page() -> bytes:
        found = static_files.find(static_files.INDEX)
        assert found is not None
        return found.content

    body = json.dumps({"model": "m", "prompt": "word " * PROMPT_WORDS}).encode()
    shared_by = list(router.members)[::2]
    for one in shared_by:  # all of the prompt, at every other replica
        router.placement.approximate.routed(one.slot, model_keys(router, body))
    queries = [Query(sort="name", order="asc", filter=f"replica-{number:02d}") for number in range(SHAPES)]
    await told("GET /dashboard", page, rounds)
    await told("the feed's first frame, alerts judged", first, rounds)
    await told("a frame of the feed", shown(Query()), rounds)
    await told(f"{SHAPES} frames, all of different questions", shown(*queries), rounds)
    await told("GET /dashboard/replicas/NAME", replica, rounds)
    await told("GET /decisions/ID", decision, rounds)
    await told(f"POST /explain, {PROMPT_WORDS:,} words", explain, rounds)
    await told(f"a point of the history, each {EVERY_S:g} s", dashboard.sampling.sample, rounds, target="")
    print()
    await small(rounds)
    await front.close()


def model_keys(router: Router, body: bytes) -> list[int]:
    model = router.members.model("m")
    prompt = model.tokens.draft("completions", body, read_peek(body), None, None, max_model_len=None).finish()
    return list(prompt.keys(APPROXIMATE))


async def small(rounds: int) -> None:
    """Measure a history sample, which the router takes with or without viewers."""
    front = FrontOnWires(4)
    sampling = dashboard_of(front.router).sampling
    for member in front.router.members:
        counted(member, 1)
    heading("a point of the history with 4 replicas")
    figures = []
    for number in range(rounds * 20):
        for member in front.router.members:
            counted(member, number)
        began_s = time.perf_counter()
        await sampling.sample()
        figures.append((time.perf_counter() - began_s) * 1e6)
    row(f"time each {EVERY_S:g} s, after requests at every replica", figures, "us")
    print()
    await front.close()


async def told(name: str, answer: Callable[[], Awaitable[Any]], rounds: int, target: str = TARGET_MS) -> None:
    took_ms, stalls_ms = [], []
    for _ in range(rounds + 1):  # the first is no figure
        stalls = asyncio.create_task(longest_stall_s())
        await asyncio.sleep(10 * TICK_S)
        began_s = time.perf_counter()
        await answer()
        took_ms.append((time.perf_counter() - began_s) * 1000)
        await asyncio.sleep(10 * TICK_S)
        stalls.cancel()
        stalls_ms.append(await stalls * 1000)
    row(f"{name}: answered after", took_ms[1:], "ms", target)
    row(f"{name}: longest delay of other work", stalls_ms[1:], "ms")


def busy(router: Router) -> None:
    """Count served requests at all replicas, and fill the decisions."""
    for number, member in enumerate(router.members):
        member.health.probed(True, "", router.now_s())
        counted(member, number)
    model = next(iter(router.members.models.values()))
    for number in range(router.config.decisions):
        decision = router.placement.decide(Question(tokens=1000, matched={}), model.candidates)
        assert decision.chosen is not None
        outcome = DecisionRecord(
            time.time(), f"r{number}", model.name, chosen=decision.chosen.name, prompt_tokens=1000, status=200
        )
        router.history.decisions.append(PastDecision(outcome, decision))


def counted(member: Any, number: int) -> None:
    tally = member.tally("m")
    tally.statuses[200] = tally.statuses.get(200, 0) + 10
    tally.prompt_tokens += 10_000
    tally.matched_tokens += 5_000
    for one in range(10):
        tally.first_token_s.observe((number * 10 + one) % 100 / 100)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    uvloop.run(serve(sys.argv[1:]))
