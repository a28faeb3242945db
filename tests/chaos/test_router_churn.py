"""A thousand replicas come and go under new names: the router keeps nothing about departed ones.

WARMROUTE_CHURN_CYCLES sets the number of replicas (1,200 by default).
"""

import asyncio
import gc
import os
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from typing import Any, NamedTuple

import httpx2
import pytest

from router.monitor.upkeep import Upkeep
from router.process.front import Front
from tests.chaos.replicas import open_files, resident_bytes
from tests.chaos.routers import Fleet, events_in, fleet, front, http_client, port_of
from tests.replica.serving import MODEL
from tests.router.loopback import Reply, Request, serving, until

CYCLES = int(os.environ.get("WARMROUTE_CHURN_CYCLES", "1200"))
pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(60 + CYCLES / 5),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

WARM_UP = 400  # cycles, after which most intended allocations are made
AT_ONCE = 8
PROMPTS = 16
REPLICAS = 2
FILES_TOLERANCE = 2
# Of Python's allocator. A leaked replica would hold tens of them; keys that the index has seen twice, and the last
# decisions, hold some 5,000 more or fewer.
BLOCKS_PER_CYCLE = 10
GROWTH_BYTES = 40 * 2**20  # the allocators' reserves grow for some thousand cycles only
QUICK = (
    *("--num-blocks", 1024, "--max-model-len", 2048),
    *("--set=simulated_prefill_tokens_per_s=1_000_000", "--set=simulated_decode_tokens_per_s=1000"),
    *("--set=simulated_batch_slowdown=0", "--set=simulated_step_overhead=0"),
)


class Holds(NamedTuple):
    """Resources of this process, with the router in it, while there are no replicas."""

    cycles: int
    files: int
    tasks: int
    threads: int
    blocks: int
    resident: int

    def check_against(self, before: "Holds") -> None:
        more = self.cycles - before.cycles
        assert self.tasks <= before.tasks, f"{self.tasks - before.tasks} tasks leaked"
        assert self.threads <= before.threads, f"{self.threads - before.threads} threads leaked"
        assert self.files <= before.files + FILES_TOLERANCE, f"{self.files - before.files} files leaked"
        blocks, grown = self.blocks - before.blocks, self.resident - before.resident
        assert blocks < BLOCKS_PER_CYCLE * more, f"{blocks:,} blocks of memory leaked over {more} replicas"
        assert grown < GROWTH_BYTES, f"the router grew by {grown / 2**20:.1f} MiB over {more} replicas"


class Registry:
    """A fleet's registry, as specified in docs/discovery.md."""

    def __init__(self) -> None:
        self._version = 0
        self._members: list[dict[str, Any]] = []
        self._changed = asyncio.Event()

    def publish(self, members: list[dict[str, Any]]) -> None:
        self._members = members
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def handle(self, request: Request, reply: Reply) -> None:
        if request.query.get("after") == str(self._version):
            with suppress(TimeoutError):
                async with asyncio.timeout(float(request.query["wait"])):
                    await self._changed.wait()
        await reply.whole(200, {"version": self._version, "members": self._members})


class Churn:
    """A router with constantly replaced replicas."""

    def __init__(self, running: Front, registry: Registry, urls: list[str]) -> None:
        self.running = running
        self.cycles = 0
        self.highest_slot = 0
        self._registry = registry
        self._urls = urls

    def _publish(self, names: list[str]) -> None:
        urls = [self._urls[number % len(self._urls)] for number in range(len(names))]
        self._registry.publish([{"name": name, "url": url} for name, url in zip(names, urls, strict=True)])

    async def run(self, cycles: int) -> None:
        """Add, use and remove replicas for `cycles` cycles; some leave in the middle of an answer."""
        end = self.cycles + cycles
        names: list[str] = []
        asking: list[asyncio.Task[None]] = []
        async with self._http() as http:
            while self.cycles < end:
                names = names[-AT_ONCE:] + [f"r{self.cycles + number}" for number in range(AT_ONCE)]
                self._publish(names)
                await until(lambda: self._up(names), "all others are there")  # noqa: B023
                self.highest_slot = max(self.highest_slot, *(member.slot for member in self._by_name.values()))
                await asyncio.gather(*asking)
                asking = [asyncio.create_task(self._ask(http, self.cycles + number)) for number in range(AT_ONCE)]
                self.cycles += AT_ONCE
            await asyncio.gather(*asking)

    def _http(self) -> AbstractAsyncContextManager[httpx2.AsyncClient]:
        return http_client(f"http://127.0.0.1:{port_of(self.running)}")

    @property
    def _by_name(self) -> dict[str, Any]:
        return self.running.router.members.by_name

    def _up(self, names: list[str]) -> bool:
        members = self._by_name
        return members.keys() == set(names) and all(
            member.candidate.unavailable is None and member.feed_state is not None and member.feed_state.exact
            for member in members.values()
        )

    @staticmethod
    async def _ask(http: httpx2.AsyncClient, number: int) -> None:
        prompt = f"Once upon a time there were {number % PROMPTS} replicas. " * 8
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 20, "stream": True, "ignore_eos": True, "seed": 1}
        answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        events_in(answer.content)

    async def holds(self) -> Holds:
        """Remove all replicas, wait until everything settles, and measure."""
        self._publish([])
        upkeep, index = self.running.upkeep, self.running.router.placement.index
        await until(lambda: not self._by_name and not upkeep._leaving, "all have left")
        index.check()
        assert not any(holders.masks for holders in (*index.pools.values(), index.optimistic.holders))
        assert not index._blocks, "a slot of the index is still in use"
        async with self._http() as http:
            assert f'"r{self.cycles - 1}"' not in (await http.get("/metrics")).text
        await asyncio.sleep(0.3)  # libzmq's threads close sockets after us
        gc.collect()
        return Holds(
            self.cycles,
            open_files(os.getpid()),
            len(asyncio.all_tasks()),
            threading.active_count() + len(os.listdir("/proc/self/task")),
            sys.getallocatedblocks(),
            resident_bytes(os.getpid()),
        )


@asynccontextmanager
async def churning() -> AsyncIterator[Churn]:
    async with AsyncExitStack() as stack:
        replicas: Fleet = stack.enter_context(fleet(REPLICAS, *QUICK))
        registry = Registry()
        url = await stack.enter_async_context(serving(registry.handle))
        running = await stack.enter_async_context(front([], registry=url, decisions=100, recent_prompts=100))
        yield Churn(running, registry, replicas.urls)


async def test_nothing_is_kept_of_replicas_that_have_gone() -> None:
    async with churning() as churn:
        await churn.run(WARM_UP)
        before = await churn.holds()
        await churn.run(CYCLES - WARM_UP)
        after = await churn.holds()
        print(f"{before}\n{after}")
        print(
            f"{after.cycles - before.cycles} replicas came and went: {after.files - before.files:+} files, "
            f"{after.tasks - before.tasks:+} tasks, {after.threads - before.threads:+} threads, "
            f"{after.blocks - before.blocks:+,} blocks of memory, {(after.resident - before.resident) / 2**20:+.2f} MiB"
        )
        after.check_against(before)
        assert churn.highest_slot < 2 * AT_ONCE, "slots of the index are not reused"


# ---- the negative control


async def test_what_is_left_of_each_replica_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    remove = Upkeep._remove

    def removed(upkeep: Upkeep, name: str) -> None:
        kept.append({str(number): name for number in range(upkeep.members.by_name[name].slot + 50)})
        remove(upkeep, name)

    async with churning() as churn:
        await churn.run(5 * AT_ONCE)
        before = await churn.holds()
        monkeypatch.setattr(Upkeep, "_remove", removed)
        await churn.run(5 * AT_ONCE)
        after = await churn.holds()
        with pytest.raises(AssertionError, match="blocks of memory leaked"):
            after.check_against(before)
