"""Native replicas with memory beyond their cache, as users run them; they come back on the same ports and folder."""

import random
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from replica.process import REPORT_INTERVAL_S
from tests.chaos.replicas import wait_gone
from tests.chaos.routers import PORTS, RouterProcess, steady_ports, without_chance
from tests.events.processes import wait_until
from tests.processes import opened
from tests.replica.natives import Native
from tests.replica.serving import Replica

SECRET = "a secret of the fleet, not a real one"
CLIENTS = 6
START_S = 60.0  # of several replicas at once, on a busy machine
BLOCK = 16
BLOCK_BYTES = 3 * 2 * 2 * 16 * BLOCK * 4  # layers, keys and values, heads, head size, tokens, float32
POOL, HOST, DISK = 64, 200, 1200  # blocks: a few prompts, more, and all of them
GIGABYTE = 10**9


def gigabytes(blocks: int) -> str:
    return f"{(blocks + 0.5) * BLOCK_BYTES / GIGABYTE:.9f}"


SMALL = (
    *("--served-model-name", "model", "--num-blocks", POOL, "--max-num-batched-tokens", 64, "--max-num-seqs", 8),
    *("--events", "--log-level", "info", "--host-kv-gb", gigabytes(HOST)),
)


class Tiered:
    """A replica that may end and start again. Without a folder it has no disk."""

    def __init__(self, name: str, model: Path, folder: Path | None, *options: object, **environment: str) -> None:
        self.name = name
        self.model = model
        self.folder = folder
        self.environment = {"WARMROUTE_KV_SECRET": SECRET} | environment
        disk = () if folder is None else ("--disk-kv", folder, "--disk-kv-gb", gigabytes(DISK))
        port = steady_ports(PORTS)
        where = ("--port", port, "--events-port", port + 1, "--kv-port", 0, "--replica-name", name)
        self.options = (*SMALL, *where, *disk, *options)
        self.begin()

    def begin(self, **environment: str) -> None:
        self.served = Native(self.model, *self.options, **(self.environment | environment))

    def wait_ready(self) -> None:
        self.served.wait_ready(START_S)
        self.engine_pid = self.served.engine_pid

    def start(self, **environment: str) -> None:
        self.begin(**environment)
        self.wait_ready()

    def end(self, number: int = signal.SIGKILL) -> int:
        status = self.served.end(number)
        wait_gone(self.engine_pid)
        return status

    @property
    def spec(self) -> tuple[str, str]:
        return "--replica", f"url={self.served.url},name={self.name}"

    @property
    def log(self) -> str:
        return "".join(self.served.err)

    @property
    def file(self) -> Path:
        """The file that its engine has open."""
        assert self.folder is not None
        named = opened(self.engine_pid)
        [found] = [file for file in self.folder.glob("*.blocks") if str(file) in named]
        return found

    def metric(self, name: str, **labels: str) -> float:
        """The sum of all samples with these labels."""
        told = self.served.get("/metrics").body.decode()
        lines = [line for line in told.splitlines() if line.startswith(f"warmroute:{name}{{")]
        labelled = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(float(line.split()[-1]) for line in lines if all(label in line for label in labelled))

    def wait_for(self, name: str, more_than: float = 0, **labels: str) -> None:
        """Wait until the engine, which reports four times a second, says so."""
        wait_until(lambda: self.metric(name, **labels) > more_than, f"{name} {labels} is above {more_than}")

    def wait_written(self) -> None:
        """Wait until all that is to come to the disk is there: two reports of the engine say the same."""
        self.served.wait_idle()
        pause, before = threading.Event(), -1.0
        while (now := self.metric("disk_written_blocks_total")) != before:
            before = now
            pause.wait(2 * REPORT_INTERVAL_S)


@contextmanager
def tiered(
    name: str, model: Path, folder: Path | None, *options: object, ready: bool = True, **environment: str
) -> Iterator[Tiered]:
    made = Tiered(name, model, folder, *options, **environment)
    try:
        if ready:
            made.wait_ready()
        yield made
    finally:
        made.served.process.kill()
        made.served.end(None)


def text(seed: object, blocks: int = 20) -> str:
    """A text of so many blocks, by a tokenizer that takes bytes, and a few tokens more."""
    chance = random.Random(f"{seed}")
    return "".join(chance.choices("abcdefghijklmnopqrstuvwxyz ", k=blocks * BLOCK + 5))


def conversations(seed: object, count: int) -> list[str]:
    """The prompts of two turns each, first turns first."""
    first = [text(f"{seed} {number}") for number in range(count)]
    return first + [one + text(f"more {number}", 4) for number, one in enumerate(first)]


def body(prompt: str) -> dict[str, Any]:
    return {
        "model": "model",
        "prompt": prompt,
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "logprobs": 1,
    }


def answer(served: Replica, prompt: str) -> bytes:
    got = served.post("/v1/completions", body(prompt))
    assert got.status == 200, got.body
    return without_chance(got.body)


def cached_tokens(served: Replica, prompt: str) -> int:
    got = served.post("/v1/completions", body(prompt))
    assert got.status == 200, got.body
    cached: int = got.json["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def answers(served: Replica, prompts: Iterable[str]) -> list[bytes]:
    """The answers to all of them, several clients at a time; each is a success."""
    with ThreadPoolExecutor(CLIENTS) as clients:
        return list(clients.map(lambda prompt: answer(served, prompt), prompts))


class Undisturbed:
    """The answers of one replica with room for everything."""

    def __init__(self, served: Replica) -> None:
        self._served = served
        self._known: dict[str, bytes] = {}

    def __call__(self, prompts: Sequence[str]) -> list[bytes]:
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._known]
        self._known.update(zip(new, answers(self._served, new), strict=True))
        return [self._known[prompt] for prompt in prompts]


def index_of(running: RouterProcess, name: str) -> dict[str, int]:
    """The blocks of a replica in the router's index, by medium."""
    blocks: dict[str, int] = running.status_of(name)["index"]["blocks"]
    return blocks
