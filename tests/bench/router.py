"""Measure a whole router between real sockets: approximate, exact, and exact without its message cache.

Instant workers stand for vLLM, in a process of their own: `python -m tests.bench.router` is that process. The exact
routers follow event streams without events, so they know only the prompts that they sent. The client's own CPU is not
counted; it is in this process. Linux only: it reads /proc.
"""

import asyncio
import gc
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import uvloop
import zmq

from api.openai.engine_requests import TokenizeRequest
from api.prompts.prompts import Prompts
from api.reading import read
from api.tokens.tokenizer import load_tokenizer
from tests.api.chat_templates import TEMPLATES
from tests.api.tokenizers import saved
from tests.bench.measure import heading, row
from tests.bench.tokens import MESSAGE_BYTES, ROOT, TURNS, said, trained
from tests.chaos.replicas import cpu_s
from tests.chaos.routers import RouterProcess, router
from tests.events.processes import DEADLINE_S, wait_until

MODEL = "m"
WORKERS = 2
CLIENTS = 16
ALONE = 300  # requests, of which each waits for the one before it
CHECKED_DECISIONS = CLIENTS
LEAST_HIT = 0.8  # of a conversation's last prompt, all but its last two messages has been sent before
MEGABYTE = 10**6


class Mode(NamedTuple):
    name: str
    exact: bool
    options: tuple[str, ...] = ()
    effort: float = 1.0  # the share of a workload that it is asked, so that all take about as long


APPROXIMATE = Mode("approximate", False, effort=2)
EXACT = Mode("exact", True)
UNCACHED = Mode("exact, no message cache", True, ("--set=message_cache_mb=0",), effort=0.3)
MODES = (APPROXIMATE, EXACT, UNCACHED)


class Workload(NamedTuple):
    name: str
    turns: int  # of each conversation
    message_bytes: int
    stream: bool
    requests: int

    @property
    def title(self) -> str:
        answer = "16 events" if self.stream else "one answer"
        return f"{self.name}, {answer} each, {CLIENTS} connections, {WORKERS} workers"

    def bodies(self, words: Sequence[str], chance: random.Random, requests: float) -> list[bytes]:
        """The first turns of all conversations, then the second ones, and so on, each with its whole history."""
        count = max(1, round(requests / self.turns))
        talks = [[said(words, chance, self.message_bytes) for _ in range(2 * self.turns - 1)] for _ in range(count)]
        return [as_http(talk[: 2 * turn + 1], self.stream) for turn in range(self.turns) for talk in talks]


GROWING = f"{TURNS} turns growing to 16 KB"
TALKS = Workload(GROWING, TURNS, MESSAGE_BYTES, stream=False, requests=1200)
STREAMED = Workload(GROWING, TURNS, MESSAGE_BYTES, stream=True, requests=1000)
SMALL = Workload("1 message of 800 bytes", 1, 800, stream=False, requests=1200)


class Figures(NamedTuple):
    cpu_ms: float  # of the router's process, per 1,000 requests
    p50_ms: float  # one request at a time, until the end of the answer


class Bench:
    """Routers side by side in front of the same workers; one is asked at a time."""

    def __init__(self, stack: ExitStack, rounds: int) -> None:
        self.words = source_words()
        self.rounds = rounds
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-router-")))
        saved(trained(self.words), folder, tokenizer_config={"chat_template": TEMPLATES["qwen"]})
        ports = stack.enter_context(workers(folder))
        self.routers = {mode: stack.enter_context(router(*options(mode, ports, folder))) for mode in MODES}
        self.asked = dict.fromkeys(MODES, 0)

    def compare(self, workload: Workload, modes: Sequence[Mode]) -> None:
        measured: dict[Mode, list[Figures]] = {mode: [] for mode in modes}
        for mode in modes:
            self._alone_s(mode, workload, random.Random(workload.title))  # warms up
        for number in range(self.rounds):
            for mode in modes if number % 2 else reversed(modes):
                chance = random.Random(f"{workload.title} {number}")
                measured[mode].append(self._one_round(mode, workload, chance))
        heading(workload.title)
        rows("CPU per 1,000 requests", {mode: [one.cpu_ms for one in measured[mode]] for mode in modes})
        rows("median time, one at a time", {mode: [one.p50_ms for one in measured[mode]] for mode in modes})
        print()

    def _one_round(self, mode: Mode, workload: Workload, chance: random.Random) -> Figures:
        running = self.routers[mode]
        bodies = workload.bodies(self.words, chance, workload.requests * mode.effort)
        before_s = cpu_s(running.process.pid)
        self._ask(mode, workload, bodies, CLIENTS)
        used_s = cpu_s(running.process.pid) - before_s
        check(running, mode, workload)
        return Figures(used_s * 1e6 / len(bodies), statistics.median(self._alone_s(mode, workload, chance)) * 1000)

    def _alone_s(self, mode: Mode, workload: Workload, chance: random.Random) -> list[float]:
        return self._ask(mode, workload, workload.bodies(self.words, chance, ALONE * mode.effort), 1)

    def _ask(self, mode: Mode, workload: Workload, bodies: list[bytes], clients: int) -> list[float]:
        """Seconds from each request to the end of its answer."""
        gc.collect()
        durations_s: list[float] = []
        expected = b"".join(EVENTS) if workload.stream else PLAIN
        uvloop.run(ask_all(self.routers[mode].port, iter(bodies), expected, clients, durations_s))
        assert len(durations_s) == len(bodies), (len(durations_s), len(bodies))
        self.asked[mode] += len(bodies)
        return durations_s

    def memory(self) -> None:
        heading("peak resident memory of the router, after all of that")
        for mode, running in self.routers.items():
            row(f"{mode.name}: {self.asked[mode]:,} requests", [peak_bytes(running.process.pid) / MEGABYTE], "MB")


def run(rounds: int) -> None:
    with ExitStack() as stack:
        bench = Bench(stack, rounds)
        bench.compare(TALKS, MODES)
        bench.compare(STREAMED, MODES)
        bench.compare(SMALL, (APPROXIMATE, EXACT))
        bench.memory()


def rows(what: str, figures: dict[Mode, list[float]]) -> None:
    for mode, measured in figures.items():
        row(f"{mode.name}: {what}", measured, "ms")
    for over, under in ((EXACT, APPROXIMATE), (EXACT, UNCACHED)):
        if over in figures and under in figures:
            ratios = [one / other for one, other in zip(figures[over], figures[under], strict=True)]
            row(f"{over.name} / {under.name}: {what}", ratios, "times")


def source_words() -> list[str]:
    return " ".join(path.read_text() for path in sorted(ROOT.glob("*/*.py"))).split(" ")


# ---- the routers


def options(mode: Mode, ports: Sequence["Ports"], folder: Path) -> list[str]:
    replicas = [f"url=http://127.0.0.1:{one.http}" for one in ports]
    if not mode.exact:
        return [word for replica in replicas for word in ("--replica", replica)]
    replicas = [f"{url},events=tcp://127.0.0.1:{one.events}" for url, one in zip(replicas, ports, strict=True)]
    words = [word for replica in replicas for word in ("--replica", replica)]
    return [*words, "--model-dir", f"{MODEL}={folder}", *mode.options]


def check(running: RouterProcess, mode: Mode, workload: Workload) -> None:
    """Check that the router follows its mode, finds earlier prompts in caches, and logs no errors."""
    replicas = running.get("/replicas").json["replicas"]
    assert [one["block_size"] for one in replicas] == [16 if mode.exact else None] * WORKERS, replicas
    assert all(one["available"] and one["breaker"] == "closed" for one in replicas), replicas
    for decision in running.decisions(CHECKED_DECISIONS):
        assert decision["exact"] == mode.exact and decision["status"] == 200 and not decision["retries"], decision
        if workload.turns > 1:
            found = max(one["matched_tokens"] for one in decision["candidates"])
            assert found >= LEAST_HIT * decision["prompt_tokens"], decision
    assert not any(" ERROR " in line for line in running.err), running.err


def peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


# ---- the client


class Client(asyncio.Protocol):
    """A client on one kept connection: sends one request after another and checks every answer."""

    def __init__(self, waiting: Iterator[bytes], expected: bytes, durations_s: list[float]) -> None:
        self.ended = asyncio.get_running_loop().create_future()
        self._waiting = waiting
        self._expected = expected
        self._durations_s = durations_s
        self._heard = bytearray()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._ask()

    def _ask(self) -> None:
        request = next(self._waiting, None)
        if request is None:
            self.ended.set_result(None)
            self._transport.close()
            return
        self._began_s = time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._heard += data
        body = body_of(self._heard)
        if body is not None:
            self._durations_s.append(time.perf_counter() - self._began_s)
            assert body == self._expected, f"expected the worker's answer, got {body!r}"
            self._heard.clear()
            self._ask()

    def connection_lost(self, reason: Exception | None) -> None:
        """Fail `ended`. Exceptions of `data_received` arrive here too."""
        if not self.ended.done():
            self.ended.set_exception(reason or ConnectionError(f"the router hung up after {bytes(self._heard)!r}"))


def body_of(heard: bytearray) -> bytes | None:
    """Body of a whole answer; None if the answer is incomplete."""
    end = heard.find(b"\r\n\r\n") + 4
    if end < 4:
        return None
    assert heard.startswith(b"HTTP/1.1 200 "), bytes(heard)
    length = re.search(rb"\r\ncontent-length: *(\d+)", heard[: end - 2], re.I)
    if length is not None:
        return bytes(heard[end:]) if len(heard) >= end + int(length[1]) else None
    return b"".join(chunks(bytes(heard[end:]))) if heard.endswith(b"\r\n0\r\n\r\n") else None


def chunks(encoded: bytes) -> Iterator[bytes]:
    while True:
        size, _, encoded = encoded.partition(b"\r\n")
        length = int(size, 16)
        yield encoded[:length]
        assert encoded[length : length + 2] == b"\r\n", encoded
        encoded = encoded[length + 2 :]
        if length == 0:
            assert not encoded, encoded
            return


def as_http(contents: Sequence[str], stream: bool) -> bytes:
    messages = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    fields = {"model": MODEL, "messages": messages, "stream": stream, "max_tokens": 16}
    raw = json.dumps(fields, ensure_ascii=False).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw


async def ask_all(port: int, waiting: Iterator[bytes], expected: bytes, clients: int, durations_s: list[float]) -> None:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(DEADLINE_S):
        made = [
            await loop.create_connection(lambda: Client(waiting, expected, durations_s), "127.0.0.1", port)
            for _ in range(clients)
        ]
        await asyncio.gather(*(client.ended for _, client in made))


# ---- the workers


class Ports(NamedTuple):
    http: int
    events: int  # a publisher that publishes nothing


@contextmanager
def workers(folder: Path | None = None) -> Iterator[list[Ports]]:
    """Serve the model in this folder, or bytes. They end with their stdin, so also when this process is killed."""
    command = [sys.executable, "-m", "tests.bench.router", *([] if folder is None else [str(folder)])]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdin is not None and process.stdout is not None
    try:
        yield [Ports(*ports) for ports in json.loads(process.stdout.readline())]
    finally:
        process.stdin.close()
        wait_until(lambda: process.poll() is not None, "the workers end with their stdin")
        process.stdout.close()


def chunk(number: int) -> dict[str, Any]:
    delta = {"content": f" token{number}"} if number else {"role": "assistant", "content": " token0"}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": "length" if number == 15 else None}
    return {**COMMON, "object": "chat.completion.chunk", "choices": [choice]}


COMMON = {"id": "chatcmpl-0123456789abcdef", "created": 1_700_000_000, "model": MODEL}
USAGE = {"prompt_tokens": 1, "completion_tokens": 16, "total_tokens": 17}
MESSAGE = {"role": "assistant", "content": "".join(f" token{number}" for number in range(16))}
CHOICE = {"index": 0, "message": MESSAGE, "logprobs": None, "finish_reason": "length"}
PLAIN = json.dumps({**COMMON, "object": "chat.completion", "choices": [CHOICE], "usage": USAGE}).encode()
EVENTS = [*(b"data: " + json.dumps(chunk(number)).encode() + b"\n\n" for number in range(16)), b"data: [DONE]\n\n"]
MODELS = {"object": "list", "data": [{"id": MODEL, "owned_by": "vllm", "root": MODEL, "max_model_len": 131_072}]}
METRICS = f'vllm:num_requests_running{{model_name="{MODEL}"}} 0\nvllm:num_requests_waiting{{model_name="{MODEL}"}} 0\n'


def whole(body: bytes, kind: str = "application/json", status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def pieces() -> list[bytes]:
    """Pieces of a stream as written: the head goes with the first token, the end with the last."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
    first, *others, last, done = [b"%x\r\n%b\r\n" % (len(event), event) for event in EVENTS]
    return [head + first, *others, last + done + b"0\r\n\r\n"]


PIECES = pieces()
CHAT = b"POST /v1/chat/completions"
TOKENIZE = b"POST /tokenize"  # exact mode holds its prompts against the answers
ANSWERS = {
    CHAT: whole(PLAIN),
    b"GET /v1/models": whole(json.dumps(MODELS).encode()),
    b"GET /health": whole(b""),
    b"GET /metrics": whole(METRICS.encode(), "text/plain; version=0.0.4"),
}
NOT_FOUND = whole(b'{"detail":"Not Found"}', status="404 Not Found")


class Worker(asyncio.Protocol):
    """A server's side of one connection; answers at once."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        self._heard = bytearray()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._heard += data
        end = self._heard.find(b"\r\n\r\n") + 4
        if end < 4:
            return
        length = re.search(rb"\r\ncontent-length: *(\d+)", self._heard[: end - 2], re.I)
        if len(self._heard) < end + int(length[1] if length else 0):
            return
        asked_for = b" ".join(self._heard[:end].split(b" ", 2)[:2])
        stream = asked_for == CHAT and b'"stream": true' in self._heard
        body = bytes(self._heard[end:])
        self._heard.clear()
        if stream:
            self._send(0)
        elif asked_for == TOKENIZE:
            tokens = self._prompts.tokenize(read(body, TokenizeRequest))
            self._transport.write(whole(json.dumps({"tokens": tokens}).encode()))
        else:
            self._transport.write(ANSWERS.get(asked_for, NOT_FOUND))

    def _send(self, number: int) -> None:
        """Each in a turn of the loop of its own, so that it is a packet of its own."""
        if not self._transport.is_closing():
            self._transport.write(PIECES[number])
            if number + 1 < len(PIECES):
                asyncio.get_running_loop().call_soon(self._send, number + 1)


async def work() -> None:
    loop = asyncio.get_running_loop()
    with zmq.Context() as context, ExitStack() as stack:
        prompts = Prompts(load_tokenizer(sys.argv[1] if len(sys.argv) > 1 else None))
        servers = [await loop.create_server(lambda: Worker(prompts), "127.0.0.1", 0) for _ in range(WORKERS)]
        publishers = [stack.enter_context(context.socket(zmq.PUB)) for _ in range(WORKERS)]
        events = [publisher.bind_to_random_port("tcp://127.0.0.1") for publisher in publishers]
        ports = [server.sockets[0].getsockname()[1] for server in servers]
        print(json.dumps(list(zip(ports, events, strict=True))), flush=True)
        await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(work())
