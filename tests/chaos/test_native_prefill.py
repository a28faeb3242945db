"""Two native replicas with roles behind a router: one computes prompts, the other reads them and generates.

Their answers are those of a replica that does both, to the last byte, even if the first one is killed meanwhile.
"""

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.members.spec import ReplicaSpec
from router.proxy.prefill import Prefill
from tests.events.processes import wait_until
from tests.replica.models import saved
from tests.replica.natives import SMALL, Native, native
from tests.router.loopback import until
from tests.router.scripted import Answer, Served, connect, served

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]

SECRET = "a secret of the fleet, not a real one"
OPTIONS = (*SMALL, "--events", "--events-port", 0, "--kv-port", 0, "--host-kv-gb", 0, "--log-level", "info")
PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"]
# Names, times and what was cached differ from answer to answer.
OTHERWISE = re.compile(
    rb'"(id|item_id|created|created_at|completed_at|cached_tokens|cache_read_input_tokens|input_tokens)":'
    rb' ?("[^"]*"|[0-9.]+)'
)


class Beside(NamedTuple):
    """A process as the router's tests know replicas."""

    name: str
    process: Native

    @property
    def port(self) -> int:
        return self.process.port

    @property
    def spec(self) -> ReplicaSpec:
        return ReplicaSpec(name=self.name, url=self.process.url)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[Native]:
    with native(folder, *SMALL) as running:
        yield running


@pytest.fixture(scope="module")
def decode(folder: Path) -> Iterator[Native]:
    with native(folder, *OPTIONS, "--role", "decode", WARMROUTE_KV_SECRET=SECRET) as running:
        yield running


@pytest.fixture(scope="module")
def prefill(folder: Path) -> Iterator[Native]:
    with native(folder, *OPTIONS, "--role", "prefill", WARMROUTE_KV_SECRET=SECRET) as running:
        yield running


@pytest.fixture
def dying(folder: Path) -> Iterator[Native]:
    with native(folder, *OPTIONS, "--role", "prefill", WARMROUTE_KV_SECRET=SECRET) as running:
        yield running


def body(path: str, text: str, **fields: Any) -> dict[str, Any]:
    text = f"{text}: {'the stars are far away ' * 16}"
    asked = {"model": "model", "temperature": 0, "ignore_eos": True, **fields}
    if path == "/v1/responses":
        return {**asked, "input": text, "max_output_tokens": 12, "store": False}
    if path == "/v1/completions":
        return {**asked, "prompt": text, "max_tokens": 12, "return_token_ids": True}
    return {**asked, "messages": [{"role": "user", "content": text}], "max_tokens": 12}


def said(answer: Any) -> bytes:
    assert answer.status == 200, answer.body
    return OTHERWISE.sub(b"", answer.body)


def computed(served_by: Native) -> float:
    """Prompt tokens that went through prefill."""
    families = text_string_to_metric_families(served_by.get("/metrics").body.decode())
    samples = [sample for family in families for sample in family.samples]
    [found] = [one.value for one in samples if one.name == "warmroute:computed_prompt_tokens_total"]
    return found


def more_computed(served_by: Native, before: float, least: float) -> float:
    """Wait for a report with so many computed tokens more than before; return how many there are."""
    more = 0.0

    def has_more() -> bool:
        nonlocal more
        more = computed(served_by) - before
        return more >= least

    wait_until(has_more, f"{least} tokens are computed")
    return more


@asynccontextmanager
async def routed(prefill: Native, decode: Native) -> AsyncIterator[Served]:
    replicas: Any = [Beside("prefill", prefill), Beside("decode", decode)]
    config: dict[str, Any] = {"policy": "cost", "prefill_elsewhere": "always", "health_interval_s": 0.1}
    async with served(*replicas, **config) as running:
        yield running


async def ask(running: Served, path: str, asked: dict[str, Any]) -> Answer:
    async with connect(running.port) as client:
        return await client.post(path, asked)


def outcome(running: Served) -> str | None:
    record = running.router.history.decisions[-1].record()
    assert record.prefill is not None
    found: str | None = record.prefill.outcome
    return found


@pytest.mark.parametrize(("path", "stream"), [*zip(PATHS, (False, True, True, False), strict=True)])
async def test_answers_are_those_of_one_replica(
    path: str, stream: bool, prefill: Native, decode: Native, alone: Native
) -> None:
    asked = body(path, f"{path} {stream}", stream=stream)
    expected = said(await asyncio.to_thread(alone.post, path, asked))
    before = await asyncio.to_thread(lambda: (computed(prefill), computed(decode)))
    async with routed(prefill, decode) as running:
        assert running.member("prefill").candidate.role == "prefill"
        answer = await ask(running, path, asked)
        assert said(answer) == expected
        assert answer.headers["x-warmroute-replica"] == "decode"
        await running.idle()
        assert outcome(running) == "handed"
        record = running.router.history.decisions[-1].record()
        assert record.prompt_tokens > 370 and not record.prediction_exact
    there = await asyncio.to_thread(more_computed, prefill, before[0], record.prompt_tokens - 64)
    here = await asyncio.to_thread(more_computed, decode, before[1], 1)
    assert there <= record.prompt_tokens, "but for the beginning, which other prompts share"
    assert here <= 16, "the decode replica computes the tail alone"
    decode.check()
    prefill.check()


def kill(replica: Native) -> None:
    """Kill its HTTP process first: alive for one moment longer, it would still answer for its lost engine."""
    for pid in (replica.process.pid, replica.engine_pid):
        os.kill(pid, signal.SIGKILL)
    replica.process.wait()


async def test_it_is_killed_while_it_is_read(
    dying: Native, decode: Native, alone: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = body(PATHS[0], "while")
    expected = said(await asyncio.to_thread(alone.post, PATHS[0], asked))
    end = Prefill._end

    def stopped(self: Prefill, *args: Any, **named: Any) -> None:
        os.kill(dying.engine_pid, signal.SIGSTOP)
        end(self, *args, **named)

    monkeypatch.setattr(Prefill, "_end", stopped)
    async with routed(dying, decode) as running:
        answering = asyncio.create_task(ask(running, PATHS[0], asked))
        # On a machine that is too busy to see it, the reader may have lost its patience already.
        await asyncio.to_thread(
            wait_until,
            lambda: answering.done() or decode.load()["load"]["loading_tokens"] > 0,
            "the blocks are being read",
        )
        kill(dying)
        assert said(await answering) == expected
        await running.idle()
        assert outcome(running) == "unread"
    decode.check()


async def test_nothing_fails_while_it_is_killed_under_load(dying: Native, decode: Native, alone: Native) -> None:
    asked = [body(PATHS[number % 4], f"{number} load", stream=number % 2 == 0) for number in range(16)]
    expected = await asyncio.to_thread(
        lambda: [said(alone.post(PATHS[number % 4], one)) for number, one in enumerate(asked)]
    )
    answers: dict[int, Answer] = {}

    async def client(running: Served, first: int) -> None:
        for number in range(first, len(asked), 4):
            answers[number] = await ask(running, PATHS[number % 4], asked[number])

    async with routed(dying, decode) as running:
        clients = [asyncio.create_task(client(running, first)) for first in range(4)]
        await until(lambda: len(answers) >= 5, "some are answered")
        kill(dying)
        await asyncio.gather(*clients)
        await running.idle()
        assert running.member("prefill").prefills["handed"] >= 5
    assert [said(answers[number]) for number in range(len(asked))] == expected
    assert {answer.headers["x-warmroute-replica"] for answer in answers.values()} == {"decode"}
