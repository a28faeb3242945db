"""Clients with the largest bodies, and one that measures how they delay it.

`python -m tests.hostile.attackers PORT SHAPE` runs eight clients in a process of their own; each sends bodies of one
shape, one after the other. They run at the lowest priority, since attackers do not use the CPU of the attacked machine.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path

import uvloop

from tests.replica.serving import MODEL
from tests.router.scripted import CHAT, COMPLETIONS, connect

CLIENTS = 8
SIZE = 30_000_000
UNFINISHED = 100
EVERY_S = 0.01
MEGABYTE = 10**6
HELLO = json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 4, "seed": 1, "ignore_eos": True}).encode()
FAST = (
    *("--set=simulated_prefill_tokens_per_s=1e8", "--set=simulated_decode_tokens_per_s=1e6"),
    *("--set=simulated_batch_slowdown=0", "--set=simulated_step_overhead=0", "--log-level", "warning"),
)
USER = b'{"role":"user","content":"%b"}'


def filled(pattern: bytes, size: int = SIZE, joint: bytes = b",") -> bytes:
    return joint.join([pattern] * (size // (len(pattern) + len(joint))))


def prompt(json: bytes) -> bytes:
    return b'{"model":"demo","prompt":%b}' % json


def chat(messages: bytes, more: bytes = b"") -> bytes:
    return b'{"model":"demo","messages":[%b]%b}' % (messages, more)


def biases() -> bytes:
    return b",".join([b'"%d":1' % number for number in range(SIZE // 14)])


SHAPES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "15 million token ids": (COMPLETIONS, lambda: prompt(b"[%b]" % filled(b"1"))),
    "a million messages": (CHAT, lambda: chat(filled(USER % b"x"))),
    "2 million logit_bias entries": (CHAT, lambda: chat(USER % b"x", b',"logit_bias":{%b}' % biases())),
    "nested lists": (COMPLETIONS, lambda: prompt(b"[%b]" % filled(b"[" * 300 + b"]" * 300))),
    "the same key again": (CHAT, lambda: chat(USER % b"x", b"," + filled(b'"user":"u"'))),
    "1 MB of nested lists": (COMPLETIONS, lambda: prompt(b"[%b]" % filled(b"[" * 300 + b"]" * 300, MEGABYTE))),
    "/v1/embeddings": ("/v1/embeddings", lambda: b'{"model":"demo","input":[%b]}' % filled(b"1")),
}


def posted(path: str, body: bytes) -> bytes:
    return b"POST %b HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n%b" % (path.encode(), len(body), body)


# ---- attackers


async def attack(port: int, shape: str) -> None:
    path, made = SHAPES[shape]
    raw = posted(path, made())
    os.nice(19)  # the client that is measured shares the processors with it
    statuses: Counter[int] = Counter()
    print("ready", flush=True)

    async def one() -> None:
        while True:
            with suppress(ConnectionError, asyncio.IncompleteReadError, TimeoutError):
                async with connect(port) as client:
                    client.write(raw)
                    statuses[(await client.answer()).status] += 1

    loop = asyncio.get_running_loop()
    clients = [loop.create_task(one()) for _ in range(CLIENTS)]
    await loop.run_in_executor(None, sys.stdin.read)  # until it is closed
    for client in clients:
        client.cancel()
    print(json.dumps(statuses), flush=True)


@contextmanager
def attackers(port: int, shape: str, told: Counter[str]) -> Iterator[None]:
    command = [sys.executable, "-m", "tests.hostile.attackers", str(port), shape]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            assert process.stdout.readline() == b"ready\n"
            yield
            process.stdin.close()
            told.update(json.loads(process.stdout.readline() or b"{}"))
        except BaseException:
            process.kill()
            raise


# ---- a measured client


async def latencies(port: int, duration_s: float) -> list[float]:
    took_s = []
    async with connect(port) as client:
        until_s = time.monotonic() + duration_s
        while time.monotonic() < until_s:
            began_s = time.perf_counter()
            client.write(posted(COMPLETIONS, HELLO))
            told = await client.answer()
            assert told.status == 200, told
            took_s.append(time.perf_counter() - began_s)
            await asyncio.sleep(EVERY_S)
    return took_s


def memory(pid: int, what: str = "VmHWM") -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has ended
        return 0
    return int(status.split(f"{what}:")[1].split()[0]) * 1024


def forget_peaks(*pids: int) -> None:
    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def percentile(took_s: list[float], share: float) -> float:
    return sorted(took_s)[min(len(took_s) - 1, int(len(took_s) * share))] * 1000


# ---- bodies without an end


async def unfinished(port: int, pid: int) -> tuple[Counter[int], float, float]:
    """Statuses answered before the bodies' ends; peak memory, and memory after the clients left."""
    forget_peaks(pid)
    head = b"POST %b HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % (COMPLETIONS.encode(), SIZE + 1)
    statuses: Counter[int] = Counter()
    piece = b"x" * MEGABYTE

    async with AsyncExitStack() as stack:

        async def send() -> None:
            client = await stack.enter_async_context(connect(port))
            with suppress(ConnectionError):
                client.write(head)
                for _ in range(SIZE // MEGABYTE):
                    client.write(piece)
                    await client.writer.drain()
            with suppress(TimeoutError, asyncio.IncompleteReadError, ConnectionError):
                async with asyncio.timeout(1.0):
                    statuses[int((await client.reader.readuntil(b"\r\n")).split()[1])] += 1

        await asyncio.gather(*(send() for _ in range(UNFINISHED)))
        peak = memory(pid)
    await asyncio.sleep(1.0)
    return statuses, peak / MEGABYTE, memory(pid, "VmRSS") / MEGABYTE


if __name__ == "__main__":
    uvloop.run(attack(int(sys.argv[1]), sys.argv[2]))
