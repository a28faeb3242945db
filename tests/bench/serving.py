"""Measure serving without a model: CPU of a replica's two processes, and time to cancel after a disconnect.

The clients' own CPU is not counted; they are in this process. Linux only: it reads /proc.
"""

import asyncio
import json
import random
import socket
import statistics
import string
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from tests.bench.measure import heading, row
from tests.chaos.replicas import Command, command, cpu_s
from tests.replica.serving import MODEL

CLIENTS = 32
SMALL_REQUESTS = 1000
LONG_REQUESTS = 200
LONG_BYTES = 16 * 1024
FAST_TOKENS, PACED_TOKENS = 1000, 150
CANCELLED = 20
COMMON = (
    *("--num-blocks", 26_702, "--max-model-len", 32_768, "--max-num-batched-tokens", 32_768, "--log-level", "warning"),
    *("--set=simulated_prefill_tokens_per_s=1e9", "--set=simulated_batch_slowdown=0"),
    "--set=simulated_step_overhead=0",
)
FAST = (*COMMON, "--set=simulated_decode_tokens_per_s=1e6")
PACED = (*COMMON, "--set=simulated_decode_tokens_per_s=50")


class Cost(NamedTuple):
    """CPU milliseconds per 1,000 units."""

    http: float
    engine: float


Bodies = list[dict[str, Any]]


def run(rounds: int) -> None:
    chance = random.Random(1)
    with command(*FAST) as served:
        heading(f"serving, {CLIENTS} connections, a model that takes no time; CPU per 1,000 requests or tokens")
        measure(served, "requests, not streamed, 8 tokens", rounds, lambda: [body(8)] * SMALL_REQUESTS)
        measure(served, "tokens streamed, as fast as they come", rounds, lambda: streams(FAST_TOKENS), FAST_TOKENS)
        name = "new requests of 16 KB, 1 token"
        measure(served, name, rounds, lambda: [body(1, prompt=text(chance)) for _ in range(LONG_REQUESTS)])
        same = body(1, prompt=text(chance))
        measure(served, "requests of 16 KB that hit the cache, 1 token", rounds, lambda: [same] * LONG_REQUESTS)
        print()
        heading("from a client's disconnect until its blocks are free; wall time")
        row("steps of 0 ms", [cancelled_ms(served) for _ in range(rounds)], "ms")
    with command(*PACED) as served:
        row("steps of 20 ms", [cancelled_ms(served) for _ in range(rounds)], "ms", "<= a step")
        print()
        heading(f"streaming, {CLIENTS} connections, 50 tokens/s each; CPU per 1,000 tokens")
        measure(served, "tokens streamed, each in its own step", rounds, lambda: streams(PACED_TOKENS), PACED_TOKENS)


def body(max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "hello", "max_tokens": max_tokens, "ignore_eos": True} | fields


def streams(tokens: int) -> Bodies:
    return [body(tokens, stream=True)] * CLIENTS


def text(chance: random.Random) -> str:
    return "".join(chance.choices(string.ascii_letters, k=LONG_BYTES))


def measure(served: Command, name: str, rounds: int, bodies: Callable[[], Bodies], units_each: int = 1) -> None:
    measured = [one_round(served, bodies(), units_each) for _ in range(rounds + 1)][1:]  # the first one warms up
    row(f"{name}: HTTP process", [cost.http for cost in measured], "ms")
    row(f"{name}: engine process", [cost.engine for cost in measured], "ms")


def one_round(served: Command, bodies: Bodies, units_each: int) -> Cost:
    pids = served.process.pid, served.engine_pid
    before = [cpu_s(pid) for pid in pids]
    asyncio.run(ask_all(served.port, bodies))
    thousands = len(bodies) * units_each / 1000
    return Cost(*((cpu_s(pid) - began) * 1000 / thousands for pid, began in zip(pids, before, strict=True)))


# ---- clients


async def ask_all(port: int, bodies: Bodies) -> None:
    waiting = [as_http(one) for one in bodies]
    await asyncio.gather(*(client(port, waiting) for _ in range(CLIENTS)))


async def client(port: int, waiting: list[bytes]) -> None:
    """Send one request after another on one kept connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    while waiting:
        writer.write(waiting.pop())
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), head
        await answer(head.lower())(reader)
    writer.close()
    await writer.wait_closed()


def answer(head: bytes) -> Callable[[asyncio.StreamReader], Awaitable[bytes]]:
    if b"transfer-encoding: chunked" in head:
        return lambda reader: reader.readuntil(b"\r\n0\r\n\r\n")
    length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
    return lambda reader: reader.readexactly(length)


def as_http(asked: dict[str, Any]) -> bytes:
    raw = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: replica\r\nContent-Length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


def cancelled_ms(served: Command) -> float:
    """The median of some streams. The answer to a reset, which is refused while a block is in use, is part of it."""
    return statistics.median(one_cancelled_ms(served) for _ in range(CANCELLED))


def one_cancelled_ms(served: Command) -> float:
    with (
        socket.create_connection(("127.0.0.1", served.port)) as stream,
        socket.create_connection(("127.0.0.1", served.port)) as control,
    ):
        stream.sendall(as_http(body(30_000, stream=True)))
        stream.recv(1)
        assert not can_reset(control)
        began_s = time.perf_counter()
        stream.close()
        while not can_reset(control):
            pass
        return (time.perf_counter() - began_s) * 1000


def can_reset(control: socket.socket) -> bool:
    control.sendall(b"POST /reset_prefix_cache HTTP/1.1\r\nHost: replica\r\nContent-Length: 0\r\n\r\n")
    return control.recv(2**16).startswith(b"HTTP/1.1 200 ")
