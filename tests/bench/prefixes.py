"""Measure the CPU to remember prompt beginnings, and the report of shared ones with a large fleet."""

import asyncio
import gc
import logging
import random
import time
from collections.abc import Callable
from functools import partial

import msgspec
import uvloop

from events.blocks import block_keys, root_key
from router.http.app import dashboard_of
from router.members.facts import Facts, Rank
from router.members.spec import parse_replica
from router.prompts.prefixes.recent import MAX_BLOCKS, RecentPrompt
from tests.bench.front import PLAIN, REQUESTS, STREAM, FrontOnWires, bodies
from tests.bench.measure import cpu_us, heading, row

REPLICAS = 1000
ENTRIES = 2_000_000  # (block, replica) in the index
BLOCK = 16
PROMPTS = 2000
PROMPT_BLOCKS = MAX_BLOCKS // PROMPTS
TOOLS = 12
TICK_S = 0.001


def run(rounds: int) -> None:
    logging.disable(logging.WARNING)
    uvloop.run(_remembering(rounds))
    uvloop.run(_telling(rounds))
    logging.disable(logging.NOTSET)


# ---- per request


async def _remembering(rounds: int) -> None:
    heading("CPU of a request through the front, approximate mode, 2 replicas, no sockets")
    for name, characters, stream, answer in (
        ("800 characters", 800, False, [PLAIN]),
        ("16,000 characters, 16 events", 16_000, True, STREAM),
    ):
        kinds: dict[str, tuple[FrontOnWires, list[float]]] = {
            "nothing is kept": (FrontOnWires(recent_prompts=0), []),
            "keys are kept": (FrontOnWires(show_prompts=False), []),
            "keys and texts": (FrontOnWires(), []),
        }
        for number in range(rounds + 1):  # side by side, the first is no figure
            asked = bodies(characters, stream, number * REQUESTS)

            for front, figures in kinds.values():
                figures += cpu_us(partial(asking, front, asked, answer), REQUESTS, 1)
        for kind, (front, figures) in kinds.items():
            row(f"{name}, {kind}", figures[1:], "us")
            await front.close()
    print()


def asking(front: FrontOnWires, asked: list[bytes], answer: list[bytes]) -> Callable[[], object]:
    def work() -> None:
        for body in asked:
            front.ask(body, answer)

    return work


# ---- GET /prefixes


async def _telling(rounds: int) -> None:
    heading(f"GET /prefixes with {REPLICAS:,} replicas, {ENTRIES:,} entries, {PROMPTS:,} prompts remembered")
    front = fleet()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)  # as a router has it
    for limit in (20, 200):
        took_ms, stalls_ms = [], []
        for _ in range(rounds):
            watching = asyncio.create_task(longest_stall_s())
            await asyncio.sleep(10 * TICK_S)
            began_s = time.perf_counter()
            found = await dashboard_of(front.router).prefixes.shared(limit)
            msgspec.json.encode(found)
            took_ms.append((time.perf_counter() - began_s) * 1000)
            watching.cancel()
            stalls_ms.append(await watching * 1000)
        row(f"limit={limit}: answered after", took_ms, "ms", "<= 200 ms")
        row(f"limit={limit}: longest delay of other work", stalls_ms, "ms")
    await front.close()
    print()


async def longest_stall_s() -> float:
    longest_s, last_s = 0.0, time.perf_counter()
    try:
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.perf_counter()
            longest_s, last_s = max(longest_s, now_s - last_s - TICK_S), now_s
    except asyncio.CancelledError:
        return longest_s


def fleet() -> FrontOnWires:
    """A fleet of agents: a few tools, growing histories; each replica caches some of it, and unrelated blocks."""
    front, chance = FrontOnWires(0), random.Random(1)
    router, upkeep = front.router, front.upkeep
    for port in range(1, REPLICAS + 1):
        spec = parse_replica(f"url=http://127.0.0.1:{port},engine=vllm,model=m,name=replica-{port:04d}")
        upkeep._add(spec)
        upkeep._tasks.pop(spec.name).cancel()
        member = router.members.by_name[spec.name]
        member.describe(Facts(spec=spec, models=("m",)), Rank(spec))
        member.block_size = BLOCK
    router.members.arrange()
    root = root_key("m", None, None, BLOCK)
    tools = [tokens(chance, PROMPT_BLOCKS // 2) for _ in range(TOOLS)]
    history: list[int] = []
    slots = [member.slot for member in router.members]
    for number in range(PROMPTS):
        if number % 5 == 0:
            history = list(chance.choice(tools))
        history += tokens(chance, PROMPT_BLOCKS // 10)
        keys = block_keys(history, BLOCK, root)
        router.history.recent.add(RecentPrompt("m", BLOCK, keys, router.now_s(), b"text " * 800))
        for slot in chance.sample(slots, 5):
            router.placement.index.store(slot, keys)
    held = sum(sum(router.placement.index.blocks(slot).values()) for slot in slots)
    each = (ENTRIES - held) // REPLICAS
    for place, slot in enumerate(slots):
        router.placement.index.store(slot, range(place * each, (place + 1) * each))
    return front


def tokens(chance: random.Random, blocks: int) -> list[int]:
    return [chance.randrange(100_000) for _ in range(blocks * BLOCK)]
