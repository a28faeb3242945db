"""One replica kept running: real simulated replicas, killed, stopped and frozen."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest

from fleet.host.child import Log
from fleet.host.report import Life, Report
from fleet.host.supervisor import Supervisor
from fleet.plan import ModelPlan, Task
from tests.chaos.replicas import children
from tests.replica.serving import is_alive

DEADLINE_S = 20.0


@asynccontextmanager
async def supervised(folder: Path, **plan: object) -> AsyncIterator[Supervisor]:
    fields = {"name": "m", "model": "demo", "engine": "simulated", **plan}
    log = Log(folder / "m-0.log")
    supervisor = Supervisor(Task(name="m-0", plan=ModelPlan(**fields)), "127.0.0.1", log)  # type: ignore[arg-type]
    running = asyncio.create_task(supervisor.run())
    try:
        yield supervisor
    finally:
        supervisor.kill()
        await running
        log.close()


async def seen(supervisor: Supervisor, life: Life, starts: int = 1) -> Report:
    report = await supervisor.report()
    async with asyncio.timeout(DEADLINE_S):
        while (report.life, report.starts) != (life, starts):
            report = await supervisor.report((report.host, report.version))
    return report


async def test_a_replica_that_is_killed_is_started_again_as_another_one(tmp_path: Path) -> None:
    async with supervised(tmp_path) as supervisor:
        first = await seen(supervisor, "ready")
        assert first.place is not None and first.pid is not None and first.place.model == "m"
        engines = children(first.pid)
        os.kill(first.pid, signal.SIGKILL)
        failing = await seen(supervisor, "failing")
        assert failing.why == "was killed by SIGKILL"
        assert failing.place is None
        assert any("ready on" in line for line in failing.last_words)
        again = await seen(supervisor, "ready", starts=2)
        assert again.place is not None and again.why == ""
        assert again.place.incarnation != first.place.incarnation
        assert again.host == first.host and again.version > first.version
        assert again.total_blocks > 0 and again.block_size == 16
        assert not any(is_alive(pid) for pid in engines)


@pytest.mark.parametrize("part", ["http", "engine"])
@pytest.mark.chaos
async def test_a_replica_that_hangs_is_killed_and_replaced(part: str, tmp_path: Path) -> None:
    async with supervised(tmp_path, wedged_after_s=2.0) as supervisor:
        first = await seen(supervisor, "ready")
        assert first.pid is not None
        os.kill(first.pid if part == "http" else children(first.pid)[0], signal.SIGSTOP)
        failing = await seen(supervisor, "failing")
        assert "no sign of life" in failing.why
        again = await seen(supervisor, "ready", starts=2)
        assert again.pid != first.pid


async def test_it_drains_before_it_ends(tmp_path: Path) -> None:
    options = ("--simulated-decode-tokens-per-s", "40", "--simulated-mean-output-tokens", "0")
    async with supervised(tmp_path, options=options) as supervisor:
        ready = await seen(supervisor, "ready")
        assert ready.place is not None and ready.pid is not None
        body = {"model": "m", "prompt": "x", "max_tokens": 40, "stream": True, "ignore_eos": True}
        async with (
            httpx2.AsyncClient(timeout=DEADLINE_S, trust_env=False) as http,
            http.stream("POST", f"{ready.place.url}/v1/completions", json=body) as answer,
        ):
            lines = answer.aiter_lines()
            await anext(lines)
            stopping = asyncio.create_task(supervisor.stop(10.0))
            draining = await seen(supervisor, "draining")
            assert draining.place is not None  # what runs there is still to be had
            rest = [line async for line in lines]
        assert rest[-2:] == ["data: [DONE]", ""] or "data: [DONE]" in rest
        assert await stopping is True
        ended = await supervisor.report()
        assert (ended.life, ended.place, ended.pid) == ("ended", None, None)
        assert not is_alive(ready.pid)


async def test_it_can_be_stopped_while_it_starts(tmp_path: Path) -> None:
    async with supervised(tmp_path) as supervisor:
        pid = (await seen(supervisor, "starting")).pid
        assert pid is not None
        await supervisor.stop(0.0)
        assert (await supervisor.report()).life == "ended"
        assert not is_alive(pid)


async def test_what_cannot_start_is_tried_again_and_its_last_words_are_kept(tmp_path: Path) -> None:
    async with supervised(tmp_path, environment={"PYTHONHOME": "/nowhere"}) as supervisor:
        failing = await seen(supervisor, "failing", starts=2)
        assert failing.why == "ended with status 1"
        assert "Fatal Python error" in "".join(failing.last_words)
        assert "Fatal Python error" in supervisor.log(1000)
        assert supervisor.log(1).count("\n") == 1
        assert supervisor.log(0) == ""


async def test_an_engine_that_is_not_installed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    async with supervised(tmp_path, engine="vllm") as supervisor:
        failing = await seen(supervisor, "failing", starts=0)
        assert "vllm" in failing.why
