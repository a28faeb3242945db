"""Measure `warmroute top` with a thousand replicas: its own cost, and the cost to the router."""

import gc
import io
import logging
import time

import msgspec
import uvloop
from rich.console import Console

from router.console.asking import Client
from router.console.top.app import paint
from router.console.top.history import History
from router.console.top.poller import Poller, Seen
from router.console.top.screen import Screen
from router.console.top.tables import replica_rows
from router.http.app import dashboard_of
from router.responses import FeedState, Index, Load, ReplicaList, ReplicaStatus, Served
from tests.bench.measure import heading, row
from tests.bench.prefixes import REPLICAS, fleet

SIZE = (120, 40)
FRAMES = 20


def run(rounds: int) -> None:
    logging.disable(logging.WARNING)
    uvloop.run(_asked(rounds))
    _looking(rounds)
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


def _looking(rounds: int) -> None:
    heading(f"one poll and one frame of {SIZE[0]} x {SIZE[1]} with {REPLICAS:,} replicas, CPU")
    reading, noting, drawing, pressing = [], [], [], []
    gc.collect()
    gc.freeze()  # a real terminal application holds no objects of a router
    console = Console(file=io.StringIO(), width=SIZE[0], height=SIZE[1], force_terminal=True)
    with Client("http://router") as client:
        poller, history = Poller(client, 1.0), History()
        screen = Screen(poller)
        for number in range(rounds):
            answer = msgspec.json.encode({"replicas": [told(one, number) for one in range(REPLICAS)]})
            began_s = time.process_time()
            replicas = msgspec.json.decode(answer, type=ReplicaList).replicas
            reading.append((time.process_time() - began_s) * 1000)
            began_s = time.process_time()
            history.add(replicas, float(number))
            rows = replica_rows(replicas, history)
            poller.seen = Seen("", rows, total=history.recent(*(row.key for row in rows)), at_s=0.0)
            noting.append((time.process_time() - began_s) * 1000)
            drawing.append(spent_ms(console, screen, "r"))  # reversed for each frame, so that every one has changes
            pressing.append(spent_ms(console, screen, "down"))
    row("parsing `GET /replicas`", reading, "ms")
    row("updating rates and counters", noting, "ms")
    row("a frame with nearly all cells changed", drawing, "ms", "<= 50")
    row("a key that moves the cursor", pressing, "ms", "<= 20")
    print()


def spent_ms(console: Console, screen: Screen, key: str) -> float:
    """CPU time of a key and of the frame after it."""
    drawn = paint(console, [], screen)
    began_s = time.process_time()
    for _ in range(FRAMES):
        screen.press(key)
        drawn = paint(console, drawn, screen)
    return (time.process_time() - began_s) * 1000 / FRAMES


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
