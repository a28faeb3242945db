"""Measure the longest pause of the router's loop while a replica floods it, in CPU time of its thread."""

import asyncio
import json
import resource
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Coroutine

import msgspec
import zmq

from engines import METRICS
from engines.metrics import scraped_queues
from router.members.spec import ReplicaSpec
from router.responses import FeedState
from tests.bench.measure import heading, row
from tests.hostile.lying import Liar, batch, stored
from tests.hostile.pauses import pauses
from tests.router.members.test_feeds import routing
from tests.router.scripted import served

BLOCKS = 1_000_000
ANSWER_BYTES = 600 * 10**6
PART = b"x" * 65_536
SHORT_S = 0.02
UNDER_WAY = ("a long batch is being applied", "a repair is under way", "not synchronized yet", "not connected")


def run(rounds: int) -> None:
    heading("longest pause of the router's event loop, and its peak memory")
    for name, what in FLOODS.items():
        command = [sys.executable, "-c", f"from tests.bench.floods import measure; measure({name!r})"]
        found = [
            json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            for _ in range(rounds)
        ]
        row(what[0], [one[0] for one in found], "ms")
        row(f"{what[0]}: memory", [one[1] for one in found], "MB")


def measure(name: str) -> None:
    """Prints milliseconds and megabytes; runs in a process of its own."""
    longest_s = asyncio.run(FLOODS[name][1]())
    print(json.dumps([1000 * longest_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000]))


async def follows(flood: Callable[[Liar], Awaitable[int]], *, native: bool = True) -> float:
    """A replica's events, until the batch of this number is applied."""
    with zmq.Context() as context:
        liar = Liar(context, native=native)
        async with routing() as router:
            router.follow("r", liar.source)
            async with pauses() as found:
                seq = await flood(liar)
                while not _is_through(router.state("r"), seq):
                    await asyncio.sleep(0.001)
            longest_s = found.longest_s
        liar.close()
    return longest_s


def _is_through(state: FeedState, seq: int) -> bool:
    return state.seq >= seq and state.reason not in UNDER_WAY


async def long_batch(liar: Liar) -> int:
    await liar.answer_snapshot()
    liar.publish(batch(stored(list(range(BLOCKS, 2 * BLOCKS)), 1, [])))
    return 0


async def long_foreign_batch(liar: Liar) -> int:
    """As of an engine whose hashes are its own: every block's key is computed."""
    await liar.answer_replay()
    liar.publish(batch(stored(list(range(BLOCKS, 2 * BLOCKS)), None, [7] * BLOCKS, block_size=1)))
    return 0


async def long_snapshot(liar: Liar) -> int:
    parts = range(BLOCKS, 2 * BLOCKS, 2000)
    await liar.answer_snapshot(*(batch(stored(list(range(first, first + 2000)), 1, [])) for first in parts))
    return -1


async def cleared(liar: Liar) -> int:
    await long_snapshot(liar)
    await asyncio.sleep(0)
    liar.publish(msgspec.msgpack.encode([0.0, [{"type": "AllBlocksCleared"}], 0]))
    return 0


async def nested(liar: Liar) -> int:
    await liar.answer_snapshot()
    event = msgspec.to_builtins(stored([1], 1, []), builtin_types=(bytes,)) | {"mm_keys": [[]] * (8 * 2**20 - 1000)}
    liar.publish(msgspec.msgpack.encode([0.0, [event], 0]))
    return 0


async def metrics() -> float:
    text = b"vllm:num_requests_running{\n" * 100_000
    async with pauses() as found:
        await asyncio.sleep(0)
        scraped_queues(text, METRICS)
        await asyncio.sleep(0)
    return found.longest_s


# ---- a long answer


async def whole_answer() -> float:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    floods = subprocess.Popen([sys.executable, "-c", f"from tests.bench.floods import answering; answering({port})"])
    try:
        spec = ReplicaSpec(name="r", url=f"http://127.0.0.1:{port}", engine="openai")
        async with served(ready=False, replicas=(spec,), health_interval_s=0.2) as running:
            while running.member("r").candidate.unavailable is not None:
                await asyncio.sleep(SHORT_S)
            command = [sys.executable, "-c", f"from tests.bench.floods import asking; asking({running.port})"]
            async with pauses() as found:
                asked = await asyncio.create_subprocess_exec(*command)
                assert await asked.wait() == 0
            return found.longest_s
    finally:
        floods.kill()
        floods.wait()


def answering(port: int) -> None:
    """Every request for an answer gets a very long one; runs in a process of its own."""
    with socket.create_server(("127.0.0.1", port)) as listener:
        while True:
            connected, _ = listener.accept()
            with connected:
                _answer(connected)


def _answer(connected: socket.socket) -> None:
    while asked := connected.recv(65_536):
        if asked.startswith(b"POST"):
            connected.sendall(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
            )
            for _ in range(ANSWER_BYTES // len(PART)):
                connected.sendall(b"10000\r\n" + PART + b"\r\n")
            connected.sendall(b"0\r\n\r\n")
            return
        body = b'{"data":[{"id":"m"}]}'
        connected.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))


def asking(port: int) -> None:
    """A client that reads as fast as it can."""
    body = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
    with socket.create_connection(("127.0.0.1", port)) as connected:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        connected.sendall(head % len(body) + body)
        read = 0
        while part := connected.recv(2**20):
            read += len(part)
    assert read > ANSWER_BYTES - len(PART), read


FLOODS: dict[str, tuple[str, Callable[[], Coroutine[object, object, float]]]] = {
    "batch": ("a batch of 1,000,000 blocks", lambda: follows(long_batch)),
    "foreign": ("the same of another engine", lambda: follows(long_foreign_batch, native=False)),
    "snapshot": ("a snapshot of 1,000,000 blocks", lambda: follows(long_snapshot)),
    "cleared": ("a cache of 1,000,000 blocks, cleared", lambda: follows(cleared)),
    "nested": ("a batch of 8 MiB of nested lists", lambda: follows(nested)),
    "answer": ("a whole answer of 600 MB", whole_answer),
    "metrics": ("2.7 MB of /metrics without one closing brace", metrics),
}
