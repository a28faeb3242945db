"""256 clients, half of them rude, on a cache that is too small for them: every answer is exact, and nothing leaks.

WARMROUTE_LOAD_S sets the seconds of load (4 by default).
"""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from events.source import Source
from events.subscriber import Subscriber
from events.tool.verify import Witness
from tests.chaos.crowd import Asked, Crowd, as_http
from tests.chaos.replicas import Command, command, open_files, resident_bytes, until
from tests.events.processes import wait_until
from tests.replica.serving import MODEL

LOAD_S = float(os.environ.get("WARMROUTE_LOAD_S", "4"))
pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(LOAD_S + 120),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

CLIENTS = 256
CHECK_EVERY_S = 0.5
WARM_UP_S = 1.5
FILES_TOLERANCE = 2
OBJECTS_TOLERANCE = 500  # the shortest load has thousands of requests
# In the second half of the load, after all intended allocations.
GROWTH_BYTES = 16 * 2**20
SMALL = (
    *("--num-blocks", 1024, "--max-model-len", 2048, "--max-num-seqs", 128, "--set=max_waiting=120"),
    *("--set=simulated_prefill_tokens_per_s=200_000", "--set=simulated_decode_tokens_per_s=1000"),
    *("--set=simulated_batch_slowdown=0", "--set=simulated_step_overhead=0"),
)
SLOW = ("--set=simulated_decode_tokens_per_s=100",)


# Only observes: on SIGUSR2 the HTTP process prints its numbers of tasks and objects.
WATCHED = """
import asyncio, gc, signal, sys
import replica.server

made = replica.server.Signals.__init__

def count(loop):
    gc.collect()
    print("holds", len(asyncio.all_tasks(loop)), len(gc.get_objects()), file=sys.stderr, flush=True)

def watched(self):
    made(self)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR2, count, loop)

replica.server.Signals.__init__ = watched
"""
RUN = "\nfrom fleet.cli import main\nmain()"


class StateStore:
    """Open files and resident memory of both processes, taken when nothing runs."""

    def __init__(self, served: Command) -> None:
        pids = {"HTTP": served.process.pid, "engine": served.engine_pid}
        self.files = {name: open_files(pid) for name, pid in pids.items()}
        self.bytes = {name: resident_bytes(pid) for name, pid in pids.items()}


def held(served: Command) -> tuple[int, int]:
    """Tasks and objects of a watched HTTP process."""

    def said() -> list[str]:
        return [line for line in served.err if line.startswith("holds ")]

    before = len(said())
    served.signal(signal.SIGUSR2)
    wait_until(lambda: len(said()) > before, "the HTTP process counts what it holds")
    _, tasks, objects = said()[-1].split()
    return int(tasks), int(objects)


async def quiet(served: Command) -> StateStore:
    """Wait until all requests have ended: only then does a higher file count mean a leak."""
    await asyncio.to_thread(served.wait_idle)
    await asyncio.to_thread(check_invariants, served)
    return StateStore(served)


def check_invariants(served: Command) -> None:
    passed = served.error_text().count("check passed")
    served.signal(signal.SIGUSR1, engine=True)
    wait_until(lambda: served.error_text().count("check passed") > passed, "the engine's invariants hold")


async def keep_checking(served: Command) -> None:
    while True:
        await asyncio.to_thread(check_invariants, served)
        await asyncio.sleep(CHECK_EVERY_S)


async def load(served: Command, crowd: Crowd, for_s: float) -> StateStore:
    checking = asyncio.create_task(keep_checking(served))
    try:
        await crowd.run(for_s)
        assert not checking.done(), checking.exception()
    finally:
        checking.cancel()
    return await quiet(served)


def witness_of(served: Command, subscriber: Subscriber) -> Witness:
    """A view of the cache that repairs nothing and counts the digests that are not its own."""
    endpoints = served.load()["endpoints"]
    source = Source(MODEL, **endpoints, topic=served.load()["topic"], model=MODEL)
    view = source.view()
    witness = Witness(view.name, view.stream, view.resolver)
    subscriber.add(source, witness)
    return witness


async def test_256_clients_with_random_manners_leave_nothing_behind() -> None:
    with command(*SMALL, program=("-c", WATCHED + RUN)) as served:
        async with Subscriber() as subscriber:
            witness = witness_of(served, subscriber)
            crowd = Crowd(served.port, CLIENTS, seed=1)
            warm = await load(served, crowd, WARM_UP_S)
            tasks, objects = await asyncio.to_thread(held, served)
            middle = await load(served, crowd, LOAD_S / 2)
            end = await load(served, crowd, LOAD_S / 2)
            report(served, crowd, witness, [warm, middle, end])
            await check_events(served, witness)
            check_traffic(served, crowd)
        tasks_now, objects_now = await asyncio.to_thread(held, served)
        print(f"tasks {tasks} -> {tasks_now}, objects {objects} -> {objects_now}")
        assert tasks_now <= tasks and objects_now < objects + OBJECTS_TOLERANCE
        for name in ("HTTP", "engine"):
            assert end.files[name] <= warm.files[name] + FILES_TOLERANCE, f"the {name} process leaks file descriptors"
            assert end.bytes[name] - middle.bytes[name] < GROWTH_BYTES, f"the {name} process leaks memory"
        assert served.end() == 0
        expected = ("check passed", " INFO running ", "holds ")
        lines = [line for line in served.err if not any(words in line for words in expected)]
        assert lines == []


def report(served: Command, crowd: Crowd, witness: Witness, phases: list[StateStore]) -> None:
    load = served.load()
    print(dict(crowd.counts))
    print("memory (MB):", [{name: value // 2**20 for name, value in phase.bytes.items()} for phase in phases])
    print("files:", [phase.files for phase in phases])
    print("pool:", load["pool"], "checks:", served.error_text().count("check passed"))
    print("digests:", witness.compared, "compared,", len(witness.wrong), "wrong;", witness.stream.stats)
    metrics = served.get("/metrics").body.decode().splitlines()
    wanted = ("num_preemptions_total", "client_disconnects_total", "request_success_total", "generation_tokens_total")
    print("\n".join(line for line in metrics if any(name in line for name in wanted) and line[0] != "#"))


async def check_events(served: Command, witness: Witness) -> None:
    """Check that the events agree with the replica's own digests, and are empty after a reset of its cache."""
    compared = witness.compared
    await until(lambda: witness.compared > compared, "the replica's digest is compared once more")
    # Gaps are allowed: on a slow machine the crowd keeps the witness, in the same loop, from its events.
    assert (witness.wrong, witness.inexact, witness.stream.stats.lost_batches) == ((), None, 0)
    witness.resolver.check()
    assert witness.resolver.digest().blocks > 0
    answer = await asyncio.to_thread(served.post, "/reset_prefix_cache")
    assert answer.status == 200, answer  # 409 if a block were in use
    await until(lambda: witness.resolver.digest().blocks == 0, "the events say that the cache is empty")
    await asyncio.to_thread(wait_until, lambda: served.load()["pool"]["cached"] == 0, "the replica says so too")


def check_traffic(served: Command, crowd: Crowd) -> None:
    """Check that the load had hits, evictions, preemptions and disconnects, and that none of it is still counted."""
    state = served.load()
    assert (state["load"]["running"], state["load"]["waiting"], state["open_requests"]) == (0, 0, 0)
    assert (state["pool"]["free"], state["pool"]["referenced"]) == (state["pool"]["total"], 0)
    assert state["load"]["queued_prefill_tokens"] == 0
    assert state["pool"]["hit_tokens"] > 0 and state["pool"]["evictions"] > 0
    assert number(served, "vllm:num_preemptions_total") > 0
    assert number(served, "warmroute:client_disconnects_total") > 0
    assert crowd.counts["whole streams"] > CLIENTS


def number(served: Command, name: str) -> float:
    lines = served.get("/metrics").body.decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


# ---- negative controls

FORGETFUL = """
from replica.http.engine_client import EngineClient

def forget(self, ids):
    for id in ids:
        self._answers.pop(id, None)

EngineClient.forget = forget
"""
TELLS_THE_LAST = """
from api.http.connection import HttpConnection

whole = HttpConnection.connection_lost

def lost(self, exc):
    while len(self._open) > 1:
        self._open.popleft()
    whole(self, exc)

HttpConnection.connection_lost = lost
"""
LONG = {"model": MODEL, "prompt": "x" * 100, "max_tokens": 1900, "stream": True, "ignore_eos": True}


@contextmanager
def one_stream(served: Command) -> Iterator[Any]:
    connection, response = served.open("POST", "/v1/completions", LONG)
    assert response.read1(1)
    try:
        yield connection
    finally:
        response.close()
        connection.close()


def test_an_open_stream_is_seen_by_every_measure() -> None:
    with command(*SMALL) as served:
        before = StateStore(served)
        with one_stream(served):
            wait_until(lambda: served.load()["pool"]["referenced"], "the stream has blocks")
            state = served.load()
            assert (state["load"]["running"], state["open_requests"]) == (1, 1)
            assert served.post("/reset_prefix_cache").status == 409
            assert StateStore(served).files["HTTP"] > before.files["HTTP"]
        served.wait_idle()
        assert served.post("/reset_prefix_cache").status == 200


@pytest.mark.parametrize("forgetful", [False, True], ids=["as it is", "without Cancel"])
def test_a_client_that_leaves_frees_its_blocks_only_because_the_engine_is_told(forgetful: bool) -> None:
    program = ("-c", FORGETFUL + RUN) if forgetful else ("-m", "fleet")
    with command(*SMALL, *SLOW, program=program) as served:
        with one_stream(served):
            pass
        wait_until(lambda: not served.load()["open_requests"], "the client is gone")
        if forgetful:
            check_nobody_is_served(served)
        else:
            served.wait_idle()


@pytest.mark.parametrize("last_alone", [False, True], ids=["as it is", "only the last is told"])
def test_a_client_that_leaves_takes_all_its_requests_with_it(last_alone: bool) -> None:
    """The first of three on one connection runs, and the others wait for it."""
    program = ("-c", TELLS_THE_LAST + RUN) if last_alone else ("-m", "fleet")
    asked = Asked("/v1/completions", LONG | {"stream": False})
    with command(*SMALL, *SLOW, program=program) as served:
        with socket.create_connection(("127.0.0.1", served.port)) as connection:
            connection.sendall(as_http(asked) * 3)
            wait_until(lambda: served.load()["load"]["running"], "the first of them runs")
        if last_alone:
            check_nobody_is_served(served)
        else:
            served.wait_idle()


def check_nobody_is_served(served: Command) -> None:
    """Check that the engine continues to serve a client that is gone."""
    seen = steps(served)
    wait_until(lambda: steps(served) > seen + 50, "the engine goes on")
    assert served.load()["pool"]["referenced"] > 0
    assert served.post("/reset_prefix_cache").status == 409


def steps(served: Command) -> float:
    return number(served, "warmroute:engine_steps_total")


MISCOUNTED = """
import sys
from replica.cache.block_pool import BlockPool
from replica.process import main

made = BlockPool.__init__

def miscounted(self, *arguments, **options):
    made(self, *arguments, **options)
    self._queue.length -= 1

BlockPool.__init__ = miscounted
sys.exit(main(sys.argv[1:]))
"""
OTHER_ENGINE = """
import sys
import replica.http.engine_client

replica.http.engine_client.engine_command = lambda: [sys.executable, "-c", {program!r}]
"""


def test_an_invariant_that_does_not_hold_is_reported_and_the_engine_continues() -> None:
    with command(program=("-c", OTHER_ENGINE.format(program=MISCOUNTED) + RUN)) as served:
        served.signal(signal.SIGUSR1, engine=True)
        wait_until(lambda: "check failed: 8192 blocks queue, 8191 are counted" in served.error_text(), "it says so")
        assert served.post("/v1/completions", LONG | {"stream": False, "max_tokens": 2}).status == 200
