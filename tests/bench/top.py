"""Measure `warmroute top` with a thousand replicas: its own cost, and the cost to the router."""

import asyncio
import gc
import logging
import time
from contextlib import aclosing
from typing import Any

import msgspec
import uvloop
from textual.pilot import Pilot

from router.console.top.app import Top
from router.console.top.poller import Poller, RouterClient
from router.http.app import dashboard_of
from router.responses import FeedState, Index, Load, ReplicaList, ReplicaStatus, Served
from tests.bench.measure import heading, row
from tests.bench.prefixes import REPLICAS, fleet

SIZE = (120, 40)
FRAMES = 20


def run(rounds: int) -> None:
    logging.disable(logging.WARNING)
    uvloop.run(_asked(rounds))
    asyncio.run(_looking(rounds))
    gc.unfreeze()
    logging.disable(logging.NOTSET)


async def _asked(rounds: int) -> None:
    heading(f"what a router with {REPLICAS:,} replicas spends on one answer, CPU")
    front = fleet()
    router = front.router
    for member in router.members:
        member.tally("m").statuses[200] = 1
        member.tally("m").first_token_s.observe(0.1)
    replicas, statuses = [], dashboard_of(router).statuses
    for _ in range(rounds):
        gc.collect()
        began_s = time.process_time()
        msgspec.json.encode(statuses.all(list(router.members)))
        replicas.append((time.process_time() - began_s) * 1000)
    row("`GET /replicas`, polled every second", replicas, "ms")
    await front.close()
    print()


async def _looking(rounds: int) -> None:
    heading(f"one poll and one frame of {SIZE[0]} x {SIZE[1]} with {REPLICAS:,} replicas, CPU")
    reading, noting, drawing, pressing = [], [], [], []
    gc.collect()
    gc.freeze()  # a real terminal application holds no objects of a router
    async with aclosing(RouterClient("http://router", None)) as asking:
        watch = Quiet(asking, 1.0)
        app = Top(watch, 3600.0)
        async with app.run_test(size=SIZE) as pilot:
            for number in range(rounds):
                answer = msgspec.json.encode({"replicas": [told(one, number) for one in range(REPLICAS)]})
                began_s = time.process_time()
                watch.replicas = msgspec.json.decode(answer, type=ReplicaList).replicas
                reading.append((time.process_time() - began_s) * 1000)
                began_s = time.process_time()
                watch.history.add(watch.replicas, float(number))
                noting.append((time.process_time() - began_s) * 1000)
                drawing.append(await frames_ms(app, pilot))
                pressing.append(await keys_ms(pilot))
    row("parsing `GET /replicas`", reading, "ms")
    row("updating rates and counters", noting, "ms")
    row("a frame with nearly all cells changed", drawing, "ms", "<= 50")
    row("a key that moves the cursor", pressing, "ms", "<= 20")
    print()


class Quiet(Poller):
    """A poller that never asks; the benchmark sets its data."""

    async def look(self) -> None:
        return


def told(number: int, at: int) -> ReplicaStatus:
    busy = number * 7919 + at * 104_729
    return ReplicaStatus(
        name=f"replica-{number:04d}",
        url=f"http://10.0.{number // 250}.{number % 250}:8000",
        engine="warmroute",
        models=["m"],
        state="exact",
        block_size=16,
        load=Load(busy % 9000, busy % 60, busy % 9, busy % 60, 8000.0 + busy % 500, total_blocks=8192),
        index=Index(blocks={"GPU": busy % 8192}),
        events=FeedState(seq=at * 26 + number),
        heard_age_s=busy % 250 / 1000,
        served=Served(at * 12, at * 18_000, at * 16_000),
    )


async def frames_ms(app: Top, pilot: Pilot[Any]) -> float:
    """CPU time per frame. The order of rows is reversed for each frame, so that every frame has changes to draw."""
    began_s = time.process_time()
    for _ in range(FRAMES):
        app.views["replicas"].table.toggle_order()
        app.draw()
        await pilot.pause()
    return (time.process_time() - began_s) * 1000 / FRAMES


async def keys_ms(pilot: Pilot[Any]) -> float:
    began_s = time.process_time()
    for _ in range(FRAMES):
        await pilot.press("down")
    return (time.process_time() - began_s) * 1000 / FRAMES
