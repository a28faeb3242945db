"""Replicas with host memory, a disk and neighbours, behind a router, while all of these fail.

Nothing may ever fail for a client, and each answer is, byte for byte, that of one replica that nobody disturbs.
"""

import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from replica.process import REPORT_INTERVAL_S
from tests.chaos.replicas import wait_gone
from tests.chaos.routers import PORTS, RouterProcess, router, steady_ports, without_chance
from tests.events.processes import tool, wait_until
from tests.replica.models import saved
from tests.replica.natives import Native
from tests.replica.serving import Replica

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(180),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

SECRET = "a secret of the fleet, not a real one"
CLIENTS = 6
START_S = 60.0  # several replicas start at once, on a busy machine
BLOCK = 16
BLOCK_BYTES = 3 * 2 * 2 * 16 * BLOCK * 4  # layers, keys and values, heads, head size, tokens, float32
POOL, HOST, DISK = 64, 200, 1200  # blocks: a few prompts, more, and all of them
GIGABYTE = 10**9


SLOW = ("--max-num-batched-tokens", 16)  # in chunks so small that bringing blocks is faster, on any machine
MOST = ("--num-blocks", 4096, "--host-kv-gb", 0)


def gigabytes(blocks: int) -> str:
    return f"{(blocks + 0.5) * BLOCK_BYTES / GIGABYTE:.9f}"


SMALL = (
    *("--served-model-name", "model", "--num-blocks", POOL, "--max-num-batched-tokens", 64, "--max-num-seqs", 8),
    *("--events", "--log-level", "info", "--host-kv-gb", gigabytes(HOST)),
)


class Tiered:
    """A replica that may end and start again. Without a folder it has no disk."""

    def __init__(self, name: str, model: Path, folder: Path | None, *options: object) -> None:
        self.name, self.model = name, model
        disk = () if folder is None else ("--disk-kv", folder, "--disk-kv-gb", gigabytes(DISK))
        port = steady_ports(PORTS)
        where = ("--port", port, "--events-port", port + 1, "--kv-port", 0, "--replica-name", name)
        self.options = (*SMALL, *where, *disk, *options)
        self.begin()

    def begin(self) -> None:
        self.served = Native(self.model, *self.options, WARMROUTE_KV_SECRET=SECRET)

    def wait_ready(self) -> None:
        self.served.wait_ready(START_S)
        self.engine_pid = self.served.engine_pid

    def end(self, number: int = signal.SIGKILL) -> int:
        status = self.served.end(number)
        wait_gone(self.engine_pid)
        return status

    @property
    def spec(self) -> tuple[str, str]:
        return "--replica", f"url={self.served.url},name={self.name}"

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
def tiered(name: str, model: Path, folder: Path | None, *options: object) -> Iterator[Tiered]:
    made = Tiered(name, model, folder, *options)
    try:
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


class Site(NamedTuple):
    one: Tiered
    two: Tiered
    undisturbed: Undisturbed


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def site(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("kv")
    with (
        tiered("one", model, folder / "one", *SLOW) as one,
        tiered("two", model, folder / "two", *SLOW) as two,
        tiered("undisturbed", model, None, *MOST) as undisturbed,
    ):
        for each in (one, two, undisturbed):
            each.wait_ready()
        yield Site(one, two, Undisturbed(undisturbed.served))


@pytest.fixture(scope="module")
def one(site: Site) -> Tiered:
    return site.one


@pytest.fixture(scope="module")
def two(site: Site) -> Tiered:
    return site.two


@pytest.fixture(scope="module")
def undisturbed(site: Site) -> Undisturbed:
    return site.undisturbed


@pytest.fixture(scope="module")
def front(one: Tiered, two: Tiered) -> Iterator[RouterProcess]:
    # By turns, so that each has to read from the other, however fast this machine computes.
    with router(*one.spec, *two.spec, "--log-level", "error", "--policy", "round-robin") as running:
        yield running


@contextmanager
def loading(served: RouterProcess, prompts: list[str]) -> Iterator[list[Future[bytes]]]:
    """Send all prompts from several clients, while the body runs; each has to succeed."""
    with ThreadPoolExecutor(CLIENTS) as clients:
        asked = [clients.submit(answer, served, prompt) for prompt in prompts]
        yield asked
        for each in asked:
            each.result()


def some_done(asked: list[Future[bytes]], count: int) -> None:
    wait_until(lambda: sum(each.done() for each in asked) >= count, f"{count} requests have ended")


def is_exact(running: RouterProcess, name: str) -> bool:
    events = running.status_of(name)["events"]
    return bool(events["exact"] and events["connected"])


# ---- host memory


def test_conversations_beyond_the_cache_come_back_from_host_memory(
    front: RouterProcess, one: Tiered, two: Tiered, undisturbed: Undisturbed
) -> None:
    prompts = conversations("host", 8)
    for _ in range(2):
        assert answers(front, prompts) == undisturbed(prompts)
    loaded = sum(each.metric("loaded_tokens_total", medium="CPU") for each in (one, two))
    assert loaded > 0
    for each in (one, two):
        wait_indexed(front, each, "CPU")
        each.served.check()


def test_the_router_says_that_a_prompt_comes_from_host_memory(front: RouterProcess, one: Tiered) -> None:
    prompt, others = text("explained"), [text(f"others {number}") for number in range(5)]
    for each in (prompt, *others):
        answer(one.served, each)

    def sources() -> set[str]:
        explained = front.post("/explain", {"model": "model", "prompt": prompt}).json
        return {each["source"] for candidate in explained["candidates"] for each in candidate["portions"]}

    wait_until(lambda: "CPU" in sources(), "it would come from host memory")
    command = [sys.executable, "-m", "fleet", "explain", prompt, "--router", front.url]
    assert "from host memory" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_tools_and_a_late_router_find_every_medium(front: RouterProcess, one: Tiered, two: Tiered) -> None:
    with (
        tool("verify", one.served.url, "--for", 1) as verify,
        tool("conform", one.served.url, "--for", 2) as conform,
    ):
        answers(front, conversations("verified", 4))
        assert verify.end(None) == 0, verify.out
        assert conform.end(None) == 0, conform.out
    for each in (one, two):
        each.wait_written()
    with router(*one.spec, *two.spec, "--log-level", "error") as late:
        for each in (one, two):
            wait_equal(front, late, each.name)
            assert index_of(late, each.name).keys() == {"GPU", "CPU", "STORAGE"}
            for running in (front, late):
                assert running.status_of(each.name)["events"]["digest_mismatches"] == 0


def wait_equal(front: RouterProcess, late: RouterProcess, name: str) -> None:
    wait_until(lambda: is_exact(late, name), "the late router follows")
    wait_until(lambda: index_of(late, name) == index_of(front, name), "both know the same")


def wait_indexed(front: RouterProcess, each: Tiered, medium: str) -> None:
    wait_until(lambda: index_of(front, each.name).get(medium), f"the router knows what {each.name} has in {medium}")


# ---- the disk


def test_a_replica_that_is_killed_under_load_is_warm_when_it_is_back(
    front: RouterProcess, one: Tiered, undisturbed: Undisturbed
) -> None:
    prompts = conversations("killed", 8)
    expected = undisturbed(prompts)
    answers(one.served, prompts[:4])
    one.wait_written()
    with loading(front, prompts * 2) as asked:
        some_done(asked, 4)
        one.end(signal.SIGKILL)
        one.begin()
    assert [each.result() for each in asked] == expected * 2
    one.wait_ready()
    assert cached_tokens(one.served, prompts[0]) > 0
    assert answers(one.served, prompts[:4]) == expected[:4]
    one.wait_for("loaded_tokens_total", medium="STORAGE")
    wait_until(lambda: is_exact(front, "one"), "the router follows it again")
    wait_indexed(front, one, "STORAGE")
    one.served.check()
