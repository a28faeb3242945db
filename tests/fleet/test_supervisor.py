"""One replica kept running: real simulated replicas, killed, stopped and frozen; and a program that is called vllm."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import httpx2
import pytest

from fleet.control.hosts import HostGone, LocalHosts
from fleet.host.child import Log
from fleet.host.engines import Launch, launch
from fleet.host.report import Life, Report
from fleet.host.supervisor import Supervisor
from fleet.plan import ModelPlan, Task
from tests.processes import children, is_alive

DEADLINE_S = 50.0


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


async def seen(supervisor: Supervisor, life: Life, starts: int | None = 1) -> Report:
    """None: however often it was started; another engine's free ports may be somebody else's before it has them."""
    report = await supervisor.report()
    async with asyncio.timeout(DEADLINE_S):
        while report.life != life or starts not in (None, report.starts):
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
    options = ("--set=simulated_decode_tokens_per_s=40", "--set=simulated_mean_output_tokens=0")
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
        with closing(Log(Path(failing.log))) as log:
            assert "Fatal Python error" in log.last(1000)
            assert log.last(1).count("\n") == 1
            assert log.last(0) == ""


async def test_an_engine_that_is_not_installed_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    async with supervised(tmp_path, engine="vllm") as supervisor:
        failing = await seen(supervisor, "failing", starts=0)
        assert "vllm" in failing.why


# ---- what the operating system refuses


async def test_a_start_that_the_system_refuses_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[Task] = []

    def first_without_its_program(task: Task, host: str, incarnation: str) -> Launch:
        if refused:
            return launch(task, host, incarnation)
        refused.append(task)
        return Launch((str(tmp_path / "python"), "-c", ""), {}, None)

    monkeypatch.setattr("fleet.host.supervisor.launch", first_without_its_program)
    async with supervised(tmp_path) as supervisor:
        failing = await seen(supervisor, "failing", starts=0)
        assert failing.why == f"cannot be started: [Errno 2] No such file or directory: '{tmp_path / 'python'}'"
        ready = await seen(supervisor, "ready", starts=1)
        assert ready.why == ""


async def test_impossible_environment_values_are_reported(tmp_path: Path) -> None:
    async with supervised(tmp_path, environment={"A": "b\0"}) as supervisor:
        failing = await seen(supervisor, "failing", starts=0)
        assert failing.why == "cannot be started: embedded null byte"


async def test_it_starts_also_when_the_current_folder_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    async with supervised(tmp_path) as supervisor:
        await seen(supervisor, "ready")


async def test_a_mistake_of_ours_is_raised_and_the_host_can_be_stopped_anyway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mistaken(*_: object) -> str:
        raise RuntimeError("a mistake")

    monkeypatch.setattr("fleet.host.supervisor.engine_missing", mistaken)
    host = LocalHosts(tmp_path).begin(Task(name="m-0", plan=ModelPlan(name="m", model="demo", engine="simulated")))
    async with asyncio.timeout(DEADLINE_S):
        await host.report(None)
        await asyncio.sleep(0)  # its task runs, and dies
        with pytest.raises(RuntimeError, match="a mistake"):
            await host.report(None)
        await host.stop(0.0)
        await host.stop(0.0)
    with pytest.raises(HostGone):
        await host.log(1)


# ---- another engine

# Answers as vLLM does, with one request that goes on for ever if its model is called busy.
VLLM = f"""#!{sys.executable}
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer

class Server(ThreadingHTTPServer):
    def server_bind(self):
        TCPServer.server_bind(self)  # asks no name server who it is

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *words):
        pass

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        running = int(sys.argv[2] == "busy")
        self.wfile.write(f"vllm:num_requests_running {{running}}\\nvllm:num_requests_waiting 0\\n".encode())

port = int(sys.argv[sys.argv.index("--port") + 1])
Server(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def vllm(tmp_path: Path) -> dict[str, object]:
    """A plan's fields."""
    (tmp_path / "vllm").write_text(VLLM)
    (tmp_path / "vllm").chmod(0o700)
    return {"engine": "vllm", "environment": {"PATH": f"{tmp_path}:/usr/bin:/bin"}}


async def test_another_engine_that_hangs_is_killed_when_its_time_to_drain_is_over(
    tmp_path: Path, vllm: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleet.host.supervisor.STOP_LIMIT_S", 0.5)
    async with supervised(tmp_path, **vllm) as supervisor:
        ready = await seen(supervisor, "ready", starts=None)
        assert ready.pid is not None
        os.kill(ready.pid, signal.SIGSTOP)
        async with asyncio.timeout(DEADLINE_S):
            assert await supervisor.stop(0.5) is False
        assert not is_alive(ready.pid)


async def test_another_engine_that_crashes_while_it_drains_is_not_waited_for(
    tmp_path: Path, vllm: dict[str, object]
) -> None:
    async with supervised(tmp_path, **{**vllm, "model": "busy"}) as supervisor:
        ready = await seen(supervisor, "ready", starts=None)
        assert ready.pid is not None and ready.open_requests == 1
        assert ready.load is not None and (ready.load.running, ready.load.waiting) == (1, 0)
        stopping = asyncio.create_task(supervisor.stop(600.0))
        await seen(supervisor, "draining", starts=None)
        os.kill(ready.pid, signal.SIGKILL)
        async with asyncio.timeout(DEADLINE_S):
            await stopping


async def test_another_engine_ends_as_soon_as_its_requests_are_done(tmp_path: Path, vllm: dict[str, object]) -> None:
    async with supervised(tmp_path, **vllm) as supervisor:
        await seen(supervisor, "ready", starts=None)
        async with asyncio.timeout(DEADLINE_S):
            assert await supervisor.stop(600.0) is True


async def test_a_replica_that_cannot_be_watched_is_not_starting_for_ever(tmp_path: Path) -> None:
    async with supervised(tmp_path, environment={"WARMROUTE_API_KEY": "schl\u00fcssel"}) as supervisor:
        failing = await seen(supervisor, "failing")
        assert failing.why.startswith(("cannot be watched", "ended with status 2"))
