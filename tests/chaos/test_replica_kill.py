"""A replica under `kill`: both processes end, clients get an error, and nothing is left behind.

The negative controls take the repair away: an engine that does not ask to die with its parent outlives it, and a
client that only counts text cannot tell a cut stream from a whole one.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from events.sockets.curve import write_keys
from tests.chaos.crowd import Asked, Oracle
from tests.chaos.replicas import (
    GONE_WITHIN_S,
    Command,
    adopting_orphans,
    can_bind,
    command,
    free_ports,
    wait_gone,
)
from tests.events.processes import DEADLINE_S, wait_until
from tests.processes import is_alive
from tests.replica.serving import MODEL

pytestmark = [pytest.mark.chaos, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

STREAMS = 16
SLOW = ("--set=simulated_decode_tokens_per_s=50", "--set=simulated_prefill_tokens_per_s=100_000")
QUIET = ("--log-level", "warning")
EVENT_SOCKETS = 4


class Told(Exception):
    """The stream reported an error."""


@pytest.fixture(autouse=True)
def _orphans_come_to_us() -> Iterator[None]:
    with adopting_orphans():
        yield


@asynccontextmanager
async def client(served: Command) -> AsyncIterator[httpx2.AsyncClient]:
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=served.url, timeout=DEADLINE_S, limits=limits) as made:
        yield made


def body(number: int, max_tokens: int, **fields: Any) -> dict[str, Any]:
    asked = {"model": MODEL, "max_tokens": max_tokens, "seed": number, "n": 1, "ignore_eos": True, "stream": True}
    asked |= fields
    if number % 2:
        return asked | {"prompt": f"story {number}"}
    return asked | {"messages": [{"role": "user", "content": f"story {number}"}]}


def path(asked: dict[str, Any]) -> str:
    return "/v1/completions" if "prompt" in asked else "/v1/chat/completions"


async def stream_text(http: httpx2.AsyncClient, asked: dict[str, Any], heard: asyncio.Semaphore | None = None) -> str:
    """Text of a whole stream. Raises Told if the stream reports an error, httpx2's errors if it is cut."""
    text, ended = "", False
    async with http.stream("POST", path(asked), json=asked) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                assert ended, "a stream without a finish_reason ends with [DONE]"
                return text
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise Told(event["error"]["code"])
            [choice] = event["choices"]
            text += choice.get("text") or choice.get("delta", {}).get("content", "")
            ended = choice["finish_reason"] is not None
            if heard is not None and text:
                heard.release()
                heard = None
    raise AssertionError("the stream ended like a whole one, without [DONE]")


@asynccontextmanager
async def streaming(served: Command, max_tokens: int) -> AsyncIterator[list[asyncio.Task[str]]]:
    """STREAMS streams, all begun."""
    heard = asyncio.Semaphore(0)
    async with client(served) as http:
        tasks = [asyncio.create_task(stream_text(http, body(n, max_tokens), heard)) for n in range(STREAMS)]
        async with asyncio.timeout(DEADLINE_S):
            for _ in tasks:
                await heard.acquire()
        yield tasks
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def outcomes(tasks: list[asyncio.Task[str]]) -> list[str | BaseException]:
    async with asyncio.timeout(DEADLINE_S):
        return await asyncio.gather(*tasks, return_exceptions=True)


async def unblocked(function: Any, *arguments: Any) -> Any:
    """A waiting function on a thread, so that the streams are read meanwhile."""
    return await asyncio.to_thread(function, *arguments)


class Traces:
    """Everything by which a replica could be noticed after its end."""

    def __init__(self, served: Command, engine_pid: int, ports: list[int]) -> None:
        self.served = served
        self.engine_pid = engine_pid
        self.ports = ports

    @classmethod
    def of(cls, served: Command) -> "Traces":
        endpoints = served.load()["endpoints"]
        ports = [int(endpoint.rpartition(":")[2]) for endpoint in endpoints.values()]
        assert len(ports) == EVENT_SOCKETS
        return cls(served, served.engine_pid, [served.port, *ports])

    def check_none(self) -> None:
        """Check that no trace is left; call it after waiting for the HTTP process."""
        with suppress(ChildProcessError):  # its parent is init, unless this process adopts orphans
            os.waitpid(self.engine_pid, 0)
        for pid in (self.served.process.pid, self.engine_pid):
            assert not os.path.exists(f"/proc/{pid}"), f"process {pid} still exists, running or as a zombie"
        assert [port for port in self.ports if not can_bind(port)] == []
        assert list(self.served.folder.iterdir()) == []


# ---- kill -9


async def test_the_engine_is_gone_when_the_http_process_is_killed() -> None:
    with command(*SLOW) as served:
        traces = Traces.of(served)
        async with streaming(served, 4000) as tasks:
            served.signal(signal.SIGKILL)
            assert await unblocked(wait_gone, traces.engine_pid, served.process.pid) < GONE_WITHIN_S
            for outcome in await outcomes(tasks):
                assert isinstance(outcome, httpx2.RemoteProtocolError | httpx2.ReadError), outcome
        assert served.end(None) == -signal.SIGKILL
        traces.check_none()


def test_the_engine_is_gone_when_the_http_process_is_killed_while_it_is_stopped() -> None:
    """A stopped process handles no signal, and its socket does not show that the other end is gone."""
    with command() as served:
        traces = Traces.of(served)
        served.signal(signal.SIGSTOP, engine=True)
        served.signal(signal.SIGKILL)
        assert wait_gone(traces.engine_pid) < GONE_WITHIN_S
        served.end(None)
        traces.check_none()


def test_an_engine_that_asks_for_no_signal_outlives_its_parent() -> None:
    """The negative control: the same kill, without the signal that ties the engine to its parent."""
    script = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        "print(child.pid, flush=True); child.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
        assert is_alive(child)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


async def test_the_http_process_ends_with_its_engine_and_every_client_is_told() -> None:
    with command(*SLOW, *QUIET) as served:
        traces = Traces.of(served)
        async with streaming(served, 4000) as tasks, client(served) as http:
            whole = asyncio.create_task(http.post("/v1/completions", json=body(1, 4000, stream=False)))
            running = lambda: served.load()["load"]["running"] == STREAMS + 1  # noqa: E731
            await unblocked(wait_until, running, "the request that is not streamed runs too")
            os.kill(traces.engine_pid, signal.SIGKILL)
            assert await unblocked(wait_gone, served.process.pid) < GONE_WITHIN_S
            assert [str(outcome) for outcome in await outcomes(tasks)] == ["engine_died"] * STREAMS
            answer = await whole
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_died")
        assert int(answer.headers["retry-after"]) >= 1
        assert served.end(None) == 1
        assert served.err == ["Error: the engine's process was killed by signal 9; the replica ends with it\n"]
        traces.check_none()


def test_a_restart_on_the_same_ports_works_at_once() -> None:
    first = free_ports(1 + EVENT_SOCKETS)
    for engine in (False, True, False):  # what is killed: the HTTP process, or the engine
        with command(*SLOW, port=first, events_port=first + 1) as served:
            assert served.post("/v1/completions", body(1, 5, stream=False)).status == 200
            connection, response = served.open("POST", "/v1/completions", body(1, 4000))
            assert response.read1(10)
            traces = Traces.of(served)
            served.signal(signal.SIGKILL, engine=engine)
            assert wait_gone(served.process.pid, traces.engine_pid) < GONE_WITHIN_S
            served.end(None)
            traces.check_none()
            connection.close()


# ---- while the model is loaded


@contextmanager
def loading(folder: Path, *options: object) -> Iterator[Command]:
    """A replica whose engine waits for a file: a named pipe among the keys of its clients, and this end of it open."""
    _, secret = write_keys(str(folder / "events"))
    clients = folder / "clients"
    clients.mkdir()
    pipe = clients / "router.key"
    os.mkfifo(pipe)
    curve = ("--curve-secret", secret, "--curve-clients", clients)
    with command(*curve, *options, ready=False, port=free_ports(1)) as served:
        writers: list[int] = []

        def waits() -> bool:
            with suppress(OSError):  # no reader
                writers.append(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
            return bool(writers) and not can_bind(served.port)

        wait_until(waits, "the engine reads the keys")
        try:
            wait_until(lambda: served.get("/ready").error["code"] == "loading", "the replica loads")
            yield served
        finally:
            for writer in writers:
                os.close(writer)


def test_while_it_loads_it_is_alive_and_refuses_work(tmp_path: Path) -> None:
    with loading(tmp_path) as served:
        assert served.get("/health").status == 200
        refused = served.post("/v1/completions", body(1, 5))
        assert (refused.status, refused.error["code"]) == (503, "loading")
        assert int(refused.headers["retry-after"]) >= 1


def test_a_replica_that_loads_ends_at_once_when_asked_to(tmp_path: Path) -> None:
    with loading(tmp_path) as served:
        traces = Traces(served, served.engine_pid, [served.port])
        began_s = time.monotonic()
        assert served.end(signal.SIGTERM) == 0
        assert time.monotonic() - began_s < GONE_WITHIN_S
        assert served.err == []
        traces.check_none()


@pytest.mark.parametrize("engine", [False, True], ids=["HTTP process", "engine"])
def test_nothing_is_left_of_a_replica_that_is_killed_while_it_loads(tmp_path: Path, engine: bool) -> None:
    with loading(tmp_path) as served:
        wait_until(lambda: not any(served.folder.iterdir()), "the two processes are connected")
        traces = Traces(served, served.engine_pid, [served.port])
        served.signal(signal.SIGKILL, engine=engine)
        assert wait_gone(served.process.pid, traces.engine_pid) < GONE_WITHIN_S
        assert served.end(None) == (1 if engine else -signal.SIGKILL)
        traces.check_none()


# ---- SIGTERM


async def test_draining_finishes_what_runs_refuses_the_rest_and_leaves_nothing() -> None:
    with command(*SLOW, *QUIET) as served:
        traces = Traces.of(served)
        async with streaming(served, 60) as tasks, client(served) as http:
            whole = asyncio.create_task(http.post("/v1/completions", json=body(1, 60, stream=False)))
            running = lambda: served.load()["load"]["running"] == STREAMS + 1  # noqa: E731
            await unblocked(wait_until, running, "the request that is not streamed runs too")
            served.signal(signal.SIGTERM)
            await unblocked(wait_until, lambda: served.get("/ready").status == 503, "the replica drains")
            refused = await asyncio.gather(*(http.post(path(body(n, 5)), json=body(n, 5)) for n in range(8)))
            for answer in refused:
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
                assert int(answer.headers["retry-after"]) >= 1
            texts = await outcomes(tasks)
            assert [len(text) for text in texts if isinstance(text, str)] == [60] * STREAMS, texts
            assert (await whole).json()["usage"]["completion_tokens"] == 60
            began_s = time.monotonic()
            assert await unblocked(served.end, None) == 0  # though the client keeps its connections open
            assert time.monotonic() - began_s < GONE_WITHIN_S
        assert served.err == []
        traces.check_none()


async def test_a_second_sigterm_ends_at_once_and_every_client_is_told() -> None:
    with command(*SLOW, *QUIET) as served:
        traces = Traces.of(served)
        async with streaming(served, 4000) as tasks:
            served.signal(signal.SIGTERM)
            await unblocked(wait_until, lambda: served.load()["draining"], "the replica drains")
            assert not any(task.done() for task in tasks)
            began_s = time.monotonic()
            assert await unblocked(served.end, signal.SIGTERM) == 0
            assert time.monotonic() - began_s < GONE_WITHIN_S
            assert [str(outcome) for outcome in await outcomes(tasks)] == ["engine_died"] * STREAMS
        traces.check_none()


# ---- SIGSTOP


async def test_streams_continue_after_the_engine_was_stopped_for_two_seconds() -> None:
    with command(*SLOW) as served:
        async with streaming(served, 100) as tasks, client(served) as http:
            served.signal(signal.SIGSTOP, engine=True)
            slowest_s = await slowest_answer_s(http, 2.0)
            assert not any(task.done() for task in tasks)
            served.signal(signal.SIGCONT, engine=True)
            texts = await outcomes(tasks)
        oracle = Oracle()
        expected = [
            oracle.choices(Asked(path(asked), asked))[0].text for asked in (body(n, 100) for n in range(STREAMS))
        ]
        assert texts == expected
        assert slowest_s < 0.5, "the HTTP process waited for the engine"
        served.wait_idle()


async def slowest_answer_s(http: httpx2.AsyncClient, for_s: float) -> float:
    """Slowest answer of the probes, polled for `for_s` seconds."""
    slowest_s, end_s = 0.0, time.monotonic() + for_s
    while (began_s := time.monotonic()) < end_s:
        for probe in ("/health", "/ready", "/load", "/metrics"):
            status = (await http.get(probe)).status_code
            assert status == 200 or probe == "/ready"  # which sees an engine that is silent for 2 s
        slowest_s = max(slowest_s, time.monotonic() - began_s)
        await asyncio.sleep(0.02)
    return slowest_s
