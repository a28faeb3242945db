"""Replicas with host memory, a disk and neighbours, behind a router, while all of these fail.

Nothing may ever fail for a client, and each answer is, byte for byte, that of one replica that nobody disturbs.
"""

import itertools
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from replica.disk.record import FileLayout
from replica.tiers.mover import FORGET_S
from tests.chaos.routers import RouterProcess, router
from tests.chaos.tiered import (
    BLOCK,
    BLOCK_BYTES,
    CLIENTS,
    DISK,
    Tiered,
    Undisturbed,
    answer,
    answers,
    cached_tokens,
    conversations,
    index_of,
    text,
    tiered,
)
from tests.events.processes import tool, wait_until
from tests.replica.models import saved

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(180),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

LONG_S = FORGET_S + 30  # a machine that is busy elsewhere may find computing faster for a while
SLOW = ("--max-num-batched-tokens", 16)  # in chunks so small that bringing blocks is faster, on any machine
MOST = ("--num-blocks", 4096, "--host-kv-gb", 0)


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
        tiered("one", model, folder / "one", *SLOW, ready=False) as one,
        tiered("two", model, folder / "two", *SLOW, ready=False) as two,
        tiered("undisturbed", model, None, *MOST, ready=False) as undisturbed,
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


def test_a_damaged_disk_costs_no_answer(one: Tiered, undisturbed: Undisturbed) -> None:
    prompts = conversations("damaged", 6)
    expected = undisturbed(prompts)
    assert answers(one.served, prompts) == expected
    one.wait_written()

    damage(one.file)
    forget_memory(one)
    before = one.metric("disk_wrong_reads_total")
    assert answers(one.served, prompts) == expected
    one.wait_for("disk_wrong_reads_total", before)
    assert "a record is torn or damaged" in one.log

    one.wait_written()
    file = one.file
    one.end(signal.SIGKILL)
    damage(file)
    one.start()
    assert answers(one.served, prompts) == expected
    one.wait_for("disk_wrong_reads_total")

    os.truncate(one.file, os.path.getsize(one.file) // 2)
    forget_memory(one)
    assert answers(one.served, prompts) == expected
    one.served.check()


def damage(file: Path) -> None:
    """Turn bits in every page but those of headers, so that each block seems to be there, and none is."""
    layout = FileLayout(BLOCK, BLOCK_BYTES)
    chance = random.Random(1)
    with file.open("r+b") as opened:
        for slot in range(DISK):
            place = layout.payload_offset(slot) + chance.randrange(BLOCK_BYTES)
            opened.seek(place)
            [byte] = opened.read(1)
            opened.seek(place)
            opened.write(bytes([byte ^ 1 + chance.randrange(255)]))


def forget_memory(site: Tiered) -> None:
    """Ask for so much else that neither the cache nor host memory has anything that was there."""
    chance = random.Random()
    answers(site.served, [text(chance.random()) for _ in range(14)])


# ---- neighbours


def branches(seed: object, prefixes: int = 6, each: int = 4) -> list[str]:
    """Prompts that share prefixes in groups; the first ones are one of each group."""
    return [text(f"{seed} {number}") + text(f"{branch}", 3) for branch in range(each) for number in range(prefixes)]


def endpoint_of(source: Tiered) -> str:
    endpoint: str = source.served.load()["kv_read"]
    return endpoint


def warm_for_router(front: RouterProcess, source: Tiered, prompts: list[str]) -> None:
    """Let the source have these prompts, and the router know."""
    answers(source.served, prompts)
    wait_until(lambda: is_exact(front, source.name), "the router follows the source")

    def is_known() -> bool:
        explained = [front.post("/explain", {"model": "model", "prompt": prompt}).json for prompt in prompts]
        return all(explained[number]["hits"][source.name] for number in range(len(prompts)))

    wait_until(is_known, "the router knows what the source has")


@pytest.mark.timeout(300)
def test_a_source_that_is_killed_in_the_middle_costs_no_answer(
    front: RouterProcess, one: Tiered, two: Tiered, undisturbed: Undisturbed
) -> None:
    endpoint = endpoint_of(one)

    def blocks_read() -> float:
        return two.metric("neighbour_blocks_total", direction="pulled")

    def is_broken_off(seed: str) -> bool:
        prompts = branches(seed)
        expected = undisturbed(prompts)
        warm_for_router(front, one, prompts[:6])
        before = blocks_read()
        with loading(front, prompts) as asked:
            wait_until(lambda: blocks_read() > before or all(each.done() for each in asked), "blocks are read")
            if is_read := blocks_read() > before:
                one.end(signal.SIGKILL)
                one.begin()
        assert [each.result() for each in asked] == expected
        return is_read

    numbers = itertools.count()
    wait_until(lambda: is_broken_off(f"killed {next(numbers)}"), "a pull is broken off", LONG_S)
    one.wait_ready()
    assert endpoint_of(one) != endpoint
    two.served.check()


# ---- with default settings
