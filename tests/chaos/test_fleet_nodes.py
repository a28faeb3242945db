"""A fleet on several machines loses processes, nodes, links and its head: clients of the router see nothing of it."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest

from tests.chaos.nodes import Node, no_nodes
from tests.chaos.routers import RouterProcess, without_chance
from tests.events.processes import DEADLINE_S, wait_until
from tests.processes import is_alive
from tests.replica.serving import MODEL

pytest.importorskip("ray")

from fleet.on_ray.orders import Launched, Trouble
from tests.chaos.ray_cluster import CONTROLLER_PORT, REPLICAS, Cluster, cluster, fleet_toml, raylet

why_not = "reads /proc" if sys.platform != "linux" else no_nodes()
pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(180),
    pytest.mark.skipif(why_not is not None, reason=why_not or ""),
]

STREAMS = 12
TOKENS = 45  # a stream takes 1.5 s
CUT_S = 12.0
DOWN_S = 5.0
AROUND_DEATH_S = 1.0
AROUND_CUT_S = 3.0


class Served(NamedTuple):
    cluster: Cluster
    router: RouterProcess


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """One fleet and router for all tests; each test leaves as many replicas ready as it found."""
    with cluster() as made:
        launched = made.launch()
        assert isinstance(launched, Launched) and launched.controller == made.url, launched
        made.wait_ready()
        router = RouterProcess("--registry", made.url, "--log-level", "error")
        try:
            router.wait_ready()
            wait_until(lambda: len(taking(router)) == REPLICAS, "the router has all replicas")
            yield Served(made, router)
        finally:
            router.process.kill()
            router.end(None)


def taking(router: RouterProcess) -> list[str]:
    """The replicas that the router would send a request to."""
    if not router.is_ready():
        return []
    return [each["name"] for each in router.get("/replicas").json["replicas"] if each["why"] is None]


# ---- a steady load


class Load:
    """A steady number of concurrent streams, each compared with its undisturbed text."""

    def __init__(self, http: httpx2.AsyncClient) -> None:
        self._http = http
        self._expected: list[bytes] = []
        self.ending = False
        self.streams = 0
        self.failed: list[str] = []
        self.pauses: list[tuple[float, float]] = []  # when each began, and its seconds

    async def learn(self) -> None:
        self._expected = await asyncio.gather(*(self._stream(number) for number in range(STREAMS)))
        assert all(each.endswith(b"data: [DONE]\n\n") for each in self._expected)

    async def go_on(self, number: int) -> None:
        while not self.ending:
            try:
                said = await self._stream(number)
            except (httpx2.HTTPError, AssertionError) as error:
                self.failed.append(f"{type(error).__name__}: {error}")
            else:
                self.streams += 1
                if said != self._expected[number]:
                    self.failed.append(f"stream {number} is another one: {said[-300:]!r}")

    async def _stream(self, number: int) -> bytes:
        text = f"Once upon a time there were {number} machines. " * (1 + number % 5)
        body = {
            "model": MODEL,
            "prompt": text,
            "max_tokens": TOKENS,
            "seed": number,
            "ignore_eos": True,
            "stream": True,
        }
        heard, last_s = bytearray(), time.monotonic()
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, (response.status_code, await response.aread())
            async for piece in response.aiter_raw():
                heard += piece
                now_s = time.monotonic()
                self.pauses.append((last_s, now_s - last_s))
                last_s = now_s
        return without_chance(bytes(heard))

    async def end(self, tasks: list[asyncio.Task[None]]) -> None:
        """Hear every stream to its end: one that hangs is a failure."""
        self.ending = True
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*tasks)

    def longest_pause_s(self, since_s: float) -> float:
        return max(pause_s for began_s, pause_s in self.pauses if began_s + pause_s >= since_s)


@asynccontextmanager
async def under_load(served: Served) -> AsyncIterator[Load]:
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(
        base_url=served.router.url, timeout=DEADLINE_S, limits=limits, trust_env=False
    ) as http:
        load = Load(http)
        await load.learn()
        tasks = [asyncio.create_task(load.go_on(number)) for number in range(STREAMS)]
        try:
            await asyncio.sleep(1.0)  # every replica has some
            yield load
        finally:
            await load.end(tasks)


async def unblocked(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    return await asyncio.to_thread(function, *arguments, **options)


def tell(fault: str, load: Load, since_s: float, ready_s: float, more: str = "") -> float:
    pause_s = load.longest_pause_s(since_s)
    print(
        f"\n{fault}: {len(load.failed)} of {load.streams} streams failed, longest pause {pause_s:.2f} s, "
        f"all ready again after {ready_s:.1f} s{more}"
    )
    assert load.failed == []
    return pause_s


# ---- faults


def test_replicas_are_spread_over_the_workers(served: Served) -> None:
    nodes = {each["node"] for each in served.cluster.replicas().values()}
    assert nodes <= {worker.address for worker in served.cluster.workers}
    assert len(nodes) > 1


@pytest.mark.grid
async def test_a_replicas_process_is_killed(served: Served) -> None:
    cluster = served.cluster
    victim = cluster.pids()[f"{MODEL}-0"]
    async with under_load(served) as load:
        began_s = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        ready_s = await unblocked(cluster.wait_ready, not_of=(victim,))
    pause_s = tell("kill -9 of a replica", load, began_s, ready_s)
    assert pause_s < AROUND_DEATH_S


@pytest.mark.grid  # a cut link is a node that is lost without a word
async def test_a_node_dies(served: Served) -> None:
    cluster = served.cluster
    node, pids = await unblocked(cluster.worker_with_replicas)
    async with coming_back(cluster, node), under_load(served) as load:
        began_s = time.monotonic()
        os.kill(raylet(node), signal.SIGKILL)
        ready_s = await unblocked(cluster.wait_ready, not_of=tuple(pids), not_on=node.address)
    pause_s = tell(f"kill -9 of a raylet, {len(pids)} replicas", load, began_s, ready_s)
    assert pause_s < AROUND_DEATH_S


async def test_a_node_that_goes_in_order_cuts_nothing(served: Served) -> None:
    """A Ray pod does this before it ends: its replicas finish their requests, then Ray stops."""
    cluster = served.cluster
    node, pids = await unblocked(cluster.worker_with_replicas)
    async with coming_back(cluster, node), under_load(served) as load:
        began_s = time.monotonic()
        drained = await unblocked(cluster.command, node, "drain", "--node", node.address, "--wait", "30")
        assert drained.returncode == 0 and b"nothing left to do" in drained.stdout, drained
        drained_s = time.monotonic() - began_s
        stop_ray(node)
        ready_s = await unblocked(cluster.wait_ready, not_of=tuple(pids), not_on=node.address)
    pause_s = tell("a node drained and stopped", load, began_s, ready_s, f"; it drained for {drained_s:.1f} s")
    assert pause_s < AROUND_DEATH_S
    assert not any(each["life"] == "draining" for each in cluster.replicas().values())


def stop_ray(node: Node) -> None:
    """Stop Ray on one node. `ray stop` would also stop the other nodes: they share this machine's processes."""
    for pid, line in node.processes().items():
        if "raylet/raylet " in line or "ray start" in line:
            os.kill(pid, signal.SIGTERM)


async def test_a_link_is_cut(served: Served) -> None:
    pauses: list[float] = []
    while not pauses or pauses[-1] >= AROUND_CUT_S:
        assert len(pauses) < 2, f"streams paused for {pauses} s"  # a machine that is busy for a moment excuses one
        pauses.append(await pause_around_a_cut(served))


async def pause_around_a_cut(served: Served) -> float:
    cluster = served.cluster
    node, pids = await unblocked(cluster.worker_with_replicas)
    async with coming_back(cluster, node), under_load(served) as load:
        began_s = time.monotonic()
        with node.unplugged():
            ready_s = await unblocked(cluster.wait_ready, not_on=node.address)
            alive = [pid for pid in pids if is_alive(pid)]
            await asyncio.sleep(max(0.0, began_s + CUT_S - time.monotonic()))
        restored_s = time.monotonic()
        await unblocked(wait_until, lambda: not any(map(is_alive, pids)), "what was cut off is gone")
        gone_s = time.monotonic() - restored_s
        more = f"; {len(alive)} of {len(pids)} replicas lived on behind the cut, and died {gone_s:.1f} s after it"
    return tell("a link cut", load, began_s, ready_s, more)


@asynccontextmanager
async def coming_back(cluster: Cluster, node: Node) -> AsyncIterator[None]:
    """Restart the node's Ray after the block, as a supervisor of `ray start --block` does."""
    try:
        yield
    finally:
        await unblocked(wait_until, lambda: not node.processes(), f"all of {node.address} has ended")
        await unblocked(cluster.start_worker(node).wait)


async def test_the_head_is_lost_and_comes_back(served: Served) -> None:
    cluster = served.cluster
    await unblocked(cluster.scale, REPLICAS + 1)
    await unblocked(cluster.wait_ready, REPLICAS + 1)
    before = cluster.pids()
    async with under_load(served) as load:
        began_s = time.monotonic()
        await unblocked(cluster.head.kill_all)
        await asyncio.sleep(DOWN_S)
        assert load.failed == []
        assert len(await unblocked(taking, served.router)) == REPLICAS + 1, "the router has forgotten replicas"
        start = cluster.start_head()
        await unblocked(start.wait)
        started_s = time.monotonic()
        await unblocked(cluster.wait_ready, REPLICAS + 1)
        ready_s = time.monotonic() - began_s
        more = f", {time.monotonic() - started_s:.1f} s after Ray on it"
    pause_s = tell(f"the head killed for {DOWN_S:g} s", load, began_s, ready_s, more)
    assert pause_s < AROUND_DEATH_S
    assert cluster.pids() == before, "replicas were restarted"
    assert cluster.fleet()["models"][0]["wanted"] == REPLICAS + 1
    await unblocked(cluster.scale, REPLICAS)
    await unblocked(cluster.wait_ready)


def test_a_second_launch_finds_the_fleet(served: Served) -> None:
    before = served.cluster.pids()
    found = served.cluster.launch()
    assert isinstance(found, Launched) and found.found
    served.cluster.wait_ready()
    assert served.cluster.pids() == before


@pytest.mark.grid
def test_a_wrong_token_is_trouble_that_names_the_fix(served: Served) -> None:
    answer = served.cluster.launch(environment={"RAY_AUTH_TOKEN": "another-token-than-that-of-the-nodes"})
    assert isinstance(answer, Trouble)
    assert "set RAY_AUTH_MODE (it is token here) and RAY_AUTH_TOKEN as they are there" in answer.message


def test_a_taken_port_is_trouble_and_leaves_nothing(served: Served) -> None:
    answer = served.cluster.launch(namespace="another")
    assert isinstance(answer, Trouble)
    assert "Address already in use; choose another port" in answer.message


@pytest.mark.grid
def test_a_fleet_follows_its_file(served: Served, tmp_path: Path) -> None:
    cluster, file, log = served.cluster, tmp_path / "fleet.toml", tmp_path / "log"
    file.write_text(fleet_toml(REPLICAS))
    own = ("--address", cluster.gcs, "--controller-port", str(CONTROLLER_PORT))
    following = cluster.start_command(log, "up", "--config", str(file), *own, "--no-router", "--follow")
    wait_until(lambda: "was there, and has the plan" in log.read_text(), f"it follows ({log})")
    file.write_text(fleet_toml(REPLICAS + 1))
    cluster.wait_ready(REPLICAS + 1)
    file.write_text("[[models]]\nmodel = 7\n")
    wait_until(lambda: "The fleet stays as it was: " in log.read_text(), f"the mistake is said ({log})")
    file.write_text(fleet_toml(REPLICAS))
    cluster.wait_ready(REPLICAS)
    following.send_signal(signal.SIGTERM)
    assert following.wait(DEADLINE_S) == 0
    assert log.read_text().endswith("The fleet goes on.\n")
    cluster.wait_ready(REPLICAS)
