"""Measure a router with several workers beside one with one worker: CPU per request, and memory.

`workers' capacity` is how many requests they answer in the time in which one alone answers one, if each has a core. The
replicas answer at once, in this process, whose CPU is not counted, as do the clients. Linux only: it reads /proc.
"""

import asyncio
import json
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import uvloop

from tests.bench.measure import heading, row
from tests.chaos.routers import RouterProcess, router
from tests.processes import family

COUNTS = 1, 2, 4
CLIENTS, REPLICAS = 32, 2
TURNS, REQUESTS = 10, 400  # of each round
CHARACTERS = 800
HEAD = "POST /v1/chat/completions HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\ncontent-length: "
CHOICE = {"index": 0, "message": {"role": "assistant", "content": " token" * 16}, "finish_reason": "length"}
USAGE = {"prompt_tokens": 1, "completion_tokens": 16, "total_tokens": 17}
ANSWER = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [CHOICE], "usage": USAGE}
MODELS = {"object": "list", "data": [{"id": "m", "owned_by": "vllm", "root": "m", "max_model_len": 131_072}]}


def answer(value: object) -> bytes:
    body = json.dumps(value).encode()
    head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: "
    return f"{head}{len(body)}\r\n\r\n".encode() + body


ANSWERS = {b"POST": answer(ANSWER), b"GET ": answer(MODELS)}


class OneAnswer(asyncio.Protocol):
    """A replica's side of a connection: whatever it is asked, it answers at once."""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._heard = b""

    def data_received(self, data: bytes) -> None:
        self._heard += data
        head, end, body = self._heard.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        if end and len(body) >= int(length or 0):
            self._transport.write(ANSWERS[self._heard[:4]])
            self._heard = b""


def bodies(seed: str) -> Iterator[bytes]:
    chance = random.Random(seed)
    for _ in range(REQUESTS):
        message = {"role": "user", "content": chance.randbytes(CHARACTERS // 2).hex()}
        body = json.dumps({"model": "m", "messages": [message], "max_tokens": 16})
        yield f"{HEAD}{len(body)}\r\n\r\n{body}".encode()


async def client(port: int, waiting: Iterator[bytes]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for request in waiting:
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), head
        await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))
    writer.close()


def cpu_s(running: RouterProcess) -> float:
    """The CPU time of all its processes, to the nanosecond."""
    tasks = (task for pid in family(running.process.pid) for task in Path(f"/proc/{pid}/task").iterdir())
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def memory_mb(running: RouterProcess) -> float:
    """Each page that processes share is divided among them."""
    rollups = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in family(running.process.pid)]
    return sum(int(text.split("Pss:")[1].split()[0]) * 1024 for text in rollups) / 1e6


async def measured(rounds: int) -> None:
    with ExitStack() as stack:
        loop = asyncio.get_running_loop()
        servers = [await loop.create_server(OneAnswer, "127.0.0.1", 0) for _ in range(REPLICAS)]
        urls = [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
        replicas = [word for url in urls for word in ("--replica", url)]

        def start(count: int) -> RouterProcess:
            return stack.enter_context(router("--workers", count, *replicas))

        routers = {count: await asyncio.to_thread(start, count) for count in COUNTS}

        async def turn(count: int, seed: str) -> float:
            running, waiting = routers[count], bodies(seed)
            before_s = cpu_s(running)
            await asyncio.gather(*(client(running.port, waiting) for _ in range(CLIENTS)))
            return (cpu_s(running) - before_s) * 1e6 / REQUESTS

        figures: dict[int, list[float]] = {count: [] for count in COUNTS}
        for number in range(-TURNS, TURNS * rounds):
            for count in COUNTS if number % 2 else reversed(COUNTS):
                taken_ms = await turn(count, str(number))
                if number >= 0:  # the first ones warm up
                    figures[count].append(taken_ms)
        heading(f"workers, {CHARACTERS} bytes, {CLIENTS} connections")
        for count, running in routers.items():
            row(f"{count}: CPU per 1,000 requests", figures[count], "ms")
            pairs = list(zip(figures[1], figures[count], strict=True))
            row(f"{count}: CPU", [several_ms / one_ms for one_ms, several_ms in pairs], "times one's")
            row(f"{count}: capacity", [count * one_ms / several_ms for one_ms, several_ms in pairs], "times one's")
            row(f"{count}: memory, idle", [memory_mb(running)], "MB")
        print()


def run(rounds: int) -> None:
    uvloop.run(measured(rounds))
