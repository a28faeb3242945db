"""The engine's process, as the HTTP process sees it: submitted to, cancelled, refusing, silent, dead."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio
import uvloop

from api.native import pack_ids
from replica.config import EngineConfig
from replica.http.engine_client import EngineClient, EngineDied, EngineRefused, OutputStream
from replica.messages import Output, Sampling, Submit
from tests.processes import is_alive
from tests.replica.serving import FAST, SLOW, config

GREETS_NOBODY = [sys.executable, "-c", "import sys, time; sys.stdin.read(); time.sleep(100)"]
ENDS_BY_CTRL_C = ["/bin/sh", "-c", "kill -INT $$"]
FAILS = [sys.executable, "-c", "import sys; sys.exit(3)"]


on_their_loop = pytest.mark.asyncio(loop_scope="module")  # that of the engines which tests share


def engine_config(**fields: Any) -> EngineConfig:
    return config(fields.pop("simulated", FAST), **fields).engine


async def started(config: EngineConfig, command: Sequence[str] | None = None, **limit: float) -> EngineClient:
    """Client of an engine that can serve."""
    engine = await EngineClient.spawn(config, command)
    try:
        await engine.ready(**limit)
    except BaseException:
        await engine.close()
        raise
    return engine


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine() -> AsyncIterator[EngineClient]:
    client = await started(engine_config())
    yield client
    await client.close()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def slow() -> AsyncIterator[EngineClient]:
    client = await started(engine_config(simulated=SLOW, max_num_seqs=2, max_waiting=1))
    yield client
    await client.close()


def submit(client: EngineClient, max_tokens: int = 5, prompt: bytes = b"hello", **fields: Any) -> Submit:
    return Submit(client.new_id(), pack_ids(list(prompt)), Sampling(max_tokens=max_tokens, seed=1), **fields)


async def everything(answers: OutputStream) -> list[Output]:
    outputs = []
    while arrived := await answers.next():
        outputs += arrived
    return outputs


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


@on_their_loop
async def test_hello_says_what_runs(engine: EngineClient) -> None:
    assert engine.hello is not None
    assert (engine.hello.model, engine.hello.num_blocks) == ("demo", 8192)


@on_their_loop
async def test_every_token_arrives_once_and_the_last_with_its_reason(engine: EngineClient) -> None:
    answers = engine.submit([submit(engine)])
    outputs = await everything(answers)
    assert len([token for output in outputs for token in output.token_ids]) == 5
    assert [output.finish_reason for output in outputs] == [None] * 4 + ["length"]
    assert answers.complete


@on_their_loop
async def test_close_wakes_all_waiters(slow: EngineClient) -> None:
    answers = slow.submit([submit(slow, 4000)])
    await answers.next()
    waiting = asyncio.create_task(answers.next())
    await asyncio.sleep(0)  # it waits now
    answers.close()
    assert await waiting == []


@on_their_loop
async def test_a_full_engine_refuses(slow: EngineClient) -> None:
    answers = slow.submit([submit(slow, 4000)])
    await answers.next()
    with pytest.raises(EngineRefused) as refused:
        await everything(slow.submit([submit(slow, 4000) for _ in range(3)]))
    assert refused.value.reason == "full"
    assert refused.value.retry_after_s >= 1
    answers.close()
    await until(lambda: slow.stats.load.running == slow.stats.load.waiting == 0)


async def test_death_reaches_all_waiters() -> None:
    slow = await started(engine_config(simulated=SLOW))
    answers = slow.submit([submit(slow, 4000)])
    assert await answers.next()
    os.kill(slow.pid, signal.SIGKILL)
    with pytest.raises(EngineDied, match="killed by signal 9"):
        await everything(answers)
    assert await slow.died() == "the engine's process was killed by signal 9"
    with pytest.raises(EngineDied):
        await slow.reset()
    with pytest.raises(EngineDied):
        await slow.submit([submit(slow)]).next()
    assert not is_alive(slow.pid)
    await slow.close()


async def test_an_engine_that_ends_before_it_is_ready_is_reported() -> None:
    with pytest.raises(EngineDied, match="ended with status 3"):
        await started(engine_config(), FAILS)


def test_an_engine_that_ends_before_it_reads_is_reported_on_the_loop_of_the_server() -> None:
    """A Ctrl-C can reach it before it has a session of its own; there is more to read than a pipe holds."""
    large = engine_config(topic="x" * 2_000_000)
    for _ in range(5):
        with pytest.raises(EngineDied, match="killed by signal 2"):
            uvloop.run(started(large, ENDS_BY_CTRL_C))


async def test_an_engine_that_says_nothing_is_given_up() -> None:
    with pytest.raises(EngineDied, match=r"silent for 0\.1 s"):
        await started(engine_config(), GREETS_NOBODY, limit_s=0.1)
