"""A router with two workers answers as one, and a worker that is killed takes no more with it than its connections."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from events.sockets.curve import write_keys
from tests.chaos.replicas import wait_gone
from tests.chaos.routers import Fleet, RouterProcess, fleet, router
from tests.events.processes import DEADLINE_S, wait_until
from tests.processes import children, opened
from tests.replica.serving import MODEL
from tests.router.scripted import CHAT, Call, Scripted, chat, connect, says

pytestmark = [pytest.mark.chaos, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

WORKERS = ("--workers", "2")
ASKED = 40  # that one of two workers gets none of this many connections has a chance of 2**-39
TRIED = 12  # fresh connections, that both workers are asked
HELD = 16  # streams
SLOW = (
    "--engine",
    "simulated",
    "--set=simulated_decode_tokens_per_s=20",
    "--served-model-name",
    MODEL,
    "--model",
    "demo",
)


@pytest.fixture(scope="module")
def replicas() -> Iterator[Fleet]:
    with fleet(2, *SLOW) as made:
        yield made


@pytest.fixture
def access_log(tmp_path: Path) -> Path:
    return tmp_path / "access.log"


@pytest.fixture
def served(replicas: Fleet, access_log: Path) -> Iterator[RouterProcess]:
    with router(*replicas.as_options, *WORKERS, "--access-log", access_log) as made:
        yield made


@pytest.fixture(scope="module")
def lasting(replicas: Fleet) -> Iterator[RouterProcess]:
    """One for tests that leave it as it was."""
    with router(*replicas.as_options, *WORKERS) as made:
        yield made


def completion(served: RouterProcess, prompt: str = "hello", **headers: str) -> Any:
    answer = served.post("/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": 1}, **headers)
    assert answer.status == 200, answer
    return answer


def values(served: RouterProcess, name: str) -> Counter[str]:
    """A metric's values by worker."""
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(served.get("/metrics").body.decode()):
        for sample in family.samples:
            if sample.name == f"warmroute_router:{name}":
                found[sample.labels["worker"]] += int(sample.value)
    return found


# ---- the start


class SlowToSome(Scripted):
    """A replica that tells one worker at once what it serves, and the others only once it may."""

    def __init__(self) -> None:
        super().__init__("slow", says(b"{}"))
        self.told = self.held = 0
        self.may = asyncio.Event()

    async def _serve(self, call: Call) -> None:
        if call.path == "/v1/models":
            self.told += 1
            if self.told > 1 and not self.may.is_set():
                self.held += 1
                await self.may.wait()
        await super()._serve(call)


async def status_of(port: int, method: str, path: str, body: Any = None) -> int:
    """Ask over a fresh connection, which any worker may get."""
    async with connect(port) as client:
        return (await client.ask(method, path, body)).status


async def test_a_router_is_ready_when_all_of_its_workers_are() -> None:
    slow = SlowToSome()
    async with slow.running():
        replica = f"url=http://127.0.0.1:{slow.port},name=slow,engine=openai"
        with router("--replica", replica, *WORKERS, ready=False) as served:
            async with asyncio.timeout(4 * DEADLINE_S):  # workers start slowly on a busy machine
                while not slow.held:  # then a worker knows the replica, and the other one does not
                    await asyncio.sleep(0.01)
            statuses = {await status_of(served.port, "GET", "/ready") for _ in range(TRIED)}
            slow.may.set()
            assert statuses == {503}
            while await status_of(served.port, "GET", "/ready") != 200:
                await asyncio.sleep(0.01)
            asked = [status_of(served.port, "POST", CHAT, chat()) for _ in range(TRIED)]
            assert set(await asyncio.gather(*asked)) == {200}


# ---- one answer


def test_whichever_worker_is_asked_all_of_them_answer(served: RouterProcess, access_log: Path) -> None:
    ids = {completion(served, f"{number} is a number").headers["x-request-id"] for number in range(ASKED)}
    by_worker = values(served, "requests_total")
    assert set(by_worker) == {"0", "1"} and by_worker.total() == ASKED and all(by_worker.values())
    for _ in range(TRIED):
        rows = served.get("/replicas").json["replicas"]
        assert sum(row["served"]["requests"] for row in rows) == ASKED
        assert {one["request_id"] for one in served.decisions(ASKED)} == ids
        newest = [one["ts"] for one in served.decisions(5)]
        assert len(newest) == 5 and newest == sorted(newest, reverse=True)
    for request_id in sorted(ids)[:TRIED]:
        assert served.get(f"/decisions/{request_id}").json["request_id"] == request_id
    assert served.get("/decisions/none-such").error["code"] == "decision_not_found"
    lines = map(json.loads, access_log.read_text().splitlines())
    assert {line["request_id"] for line in lines} >= ids


def test_what_an_administrator_changes_holds_at_all_workers_and_at_those_to_come(
    lasting: RouterProcess, replicas: Fleet
) -> None:
    assert lasting.post("/replicas", {"name": "another", "url": replicas.urls[0]}).status == 201
    assert lasting.post("/replicas/r1/drain").json["why"] == "draining"
    check_changed(lasting)
    for number in (0, 1):
        kill(lasting, number)
        check_changed(lasting)
    assert lasting.post("/replicas/r1/undrain").status == 200
    assert lasting.ask("DELETE", "/replicas/another").status == 200
    for _ in range(TRIED):
        found = {row["name"]: row["available"] for row in lasting.get("/replicas").json["replicas"]}
        assert found == {"r0": True, "r1": True}


def check_changed(served: RouterProcess) -> None:
    for _ in range(TRIED):
        found = {row["name"]: row["why"] for row in served.get("/replicas").json["replicas"]}
        assert set(found) == {"r0", "r1", "another"} and found["r1"] == "draining", found
        assert served.post("/replicas", {"name": "another", "url": "http://127.0.0.1:1"}).status == 400


def test_a_worker_knows_what_another_ones_client_has_been_answered(replicas: Fleet) -> None:
    keys = {"authorization": "Bearer mine"}
    with router(*replicas.as_options, *WORKERS, "--api-key", "mine", "--api-key", "other") as served:
        asked = {"model": MODEL, "input": "hello", "max_output_tokens": 1}
        made = served.post("/v1/responses", asked, **keys).json["id"]
        for _ in range(TRIED):
            assert served.ask("GET", f"/v1/responses/{made}", headers=keys).json["id"] == made
            again = served.post("/v1/responses", asked | {"previous_response_id": made}, **keys)
            assert again.status == 200, again
            other = {"authorization": "Bearer other"}
            assert served.ask("GET", f"/v1/responses/{made}", headers=other).status == 404


def test_the_limits_of_a_key_hold_over_all_workers(replicas: Fleet, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[keys.few]\nkey = "mine"\nmax_in_flight = 3\n')
    with router(*replicas.as_options, *WORKERS, "--api-keys", keys) as served:
        for _ in range(2):
            with held(served, authorization="Bearer mine") as streams:
                answers = Counter(response.status for _, response in streams)
                others = [response.read() for _, response in streams if response.status not in (200, 429)]
                assert answers == {200: 3, 429: HELD - 3}, others
                kill(served, worker_of(served, next(one for one, response in streams if response.status == 200)))
            wait_until(lambda: not any(row["load"]["in_flight"] for row in rows_of(served)), "all have ended")


def rows_of(served: RouterProcess) -> Any:
    return served.ask("GET", "/replicas", headers={"authorization": "Bearer mine"}).json["replicas"]


# ---- ends


def workers(served: RouterProcess) -> list[int]:
    """Their pids, by number: the order in which they started, until one is killed."""
    return children(served.process.pid)


def kill(served: RouterProcess, number: int) -> None:
    """Kill a worker, and wait until another one has taken its place."""
    before = workers(served)
    os.kill(before[number], signal.SIGKILL)

    def is_replaced() -> bool:
        [*_, newest] = workers(served)
        return newest not in before and any(f"serves again, as process {newest}\n" in line for line in served.err)

    wait_until(is_replaced, "another worker takes its place")


def tcp_lines() -> list[str]:
    return Path("/proc/net/tcp").read_text().splitlines()[1:]


def worker_of(served: RouterProcess, connection: HTTPConnection) -> int:
    """The worker that has accepted this connection."""
    assert connection.sock is not None
    ends = [f":{place[1]:04X}" for place in (connection.sock.getpeername(), connection.sock.getsockname())]
    found = [line.split() for line in tcp_lines()]
    # The kernel may print a line twice while others come and go, and an older connection of this port has no owner.
    [inode] = {parts[9] for parts in found if [parts[1][-5:], parts[2][-5:]] == ends} - {"0"}
    [number] = [number for number, pid in enumerate(workers(served)) if f"socket:[{inode}]" in opened(pid)]
    return number


def stream(served: RouterProcess, **headers: str) -> tuple[HTTPConnection, HTTPResponse]:
    asked = {"model": MODEL, "prompt": "hello", "max_tokens": 120, "stream": True, "ignore_eos": True}
    return served.open("POST", "/v1/completions", asked, headers)


def said(served: RouterProcess, words: str) -> bool:
    return any(words in line for line in served.err)


@contextmanager
def held(served: RouterProcess, **headers: str) -> Iterator[list[tuple[HTTPConnection, HTTPResponse]]]:
    with ExitStack() as stack:
        streams = []
        for _ in range(HELD):
            streams.append(stream(served, **headers))
            stack.callback(streams[-1][0].close)
        yield streams


def test_when_a_worker_is_killed_only_its_streams_break_and_new_connections_are_taken(lasting: RouterProcess) -> None:
    for _ in range(2):
        with held(lasting) as streams:
            at = [worker_of(lasting, connection) for connection, _ in streams]
            first = workers(lasting)[0]
            os.kill(first, signal.SIGKILL)
            ended = f"(process {first}) has ended by signal 9"
            wait_until(lambda: said(lasting, ended), "the first process knows it")  # noqa: B023
            for number in range(ASKED):
                completion(lasting, str(number))
            for number, (_, response) in zip(at, streams, strict=True):
                try:
                    whole = response.read().endswith(b"data: [DONE]\n\n")
                except (HTTPException, OSError):
                    whole = False
                assert whole == (number != 0), at
        wait_until(lambda: len(values(lasting, "open_requests")) == 2, "both are there again")


def test_what_a_killed_worker_had_sent_takes_no_more_room(replicas: Fleet) -> None:
    with (
        router(*replicas.as_options, *WORKERS, "--replica-limit", HELD // 2) as served,
        held(served),
        ThreadPoolExecutor() as thread,
    ):
        late = thread.submit(completion, served)
        wait_until(lambda: values(served, "queue_length").total() == 1, "all replicas are full")
        [other] = [int(worker) for worker, waiting in values(served, "queue_length").items() if not waiting]
        os.kill(workers(served)[other], signal.SIGKILL)
        assert late.result(DEADLINE_S).status == 200


# ---- files that break


GOOD = {
    "keys": '[keys.one]\nkey = "mine"\n',
    "rewrites": f'[[rewrites]]\nmodel = "another"\ntarget = "{MODEL}"\n',
}


@pytest.fixture
def files(replicas: Fleet, tmp_path: Path) -> dict[str, Path]:
    found = {name: tmp_path / f"{name}.toml" for name in (*GOOD, "replicas")}
    for name, text in GOOD.items():
        found[name].write_text(text)
    tables = (f'[[replicas]]\nname = "{spec.name}"\nurl = "{spec.url}"\n' for spec in replicas.specs)
    found["replicas"].write_text("".join(tables))
    return found


@pytest.fixture
def configured(files: dict[str, Path]) -> Iterator[RouterProcess]:
    options = ("--api-keys", files["keys"], "--model-rewrites", files["rewrites"], "--replicas-file", files["replicas"])
    with router(*options, *WORKERS) as made:
        yield made


def is_answered(served: RouterProcess) -> bool:
    asked = {"model": "another", "prompt": "hello", "max_tokens": 1}
    statuses = {served.post("/v1/completions", asked, authorization="Bearer mine").status for _ in range(TRIED)}
    return statuses == {200}


def is_whole_again(served: RouterProcess) -> bool:
    return any("serves again" in line for line in served.err)


@pytest.mark.parametrize("broken", ["keys", pytest.param("rewrites", marks=pytest.mark.grid)])
def test_a_new_worker_that_cannot_know_the_rules_serves_nobody_until_it_does(
    broken: str, configured: RouterProcess, files: dict[str, Path]
) -> None:
    files[broken].write_text("broken = [")
    os.kill(workers(configured)[0], signal.SIGKILL)
    wait_until(lambda: any(f"; there are no {broken}" in line for line in configured.err), "it has looked")
    assert is_answered(configured) and not is_whole_again(configured)
    files[broken].write_text(GOOD[broken])
    wait_until(lambda: is_whole_again(configured), "it serves")
    assert is_answered(configured)


def test_a_router_that_is_told_to_end_lets_its_streams_end(served: RouterProcess) -> None:
    with held(served) as streams:
        pids = workers(served)
        served.process.send_signal(signal.SIGTERM)
        for _, response in streams:
            assert response.read().endswith(b"data: [DONE]\n\n")
    assert served.process.wait(DEADLINE_S) == 0
    wait_gone(*pids)
    with pytest.raises(ConnectionRefusedError):
        served.get("/health")


def test_a_second_signal_cuts_what_has_not_ended(served: RouterProcess) -> None:
    connection, _ = stream(served)
    served.process.send_signal(signal.SIGINT)
    wait_until(lambda: not served.is_ready(), "it drains")
    served.process.send_signal(signal.SIGINT)
    assert served.process.wait(DEADLINE_S) == 0
    connection.close()


def test_workers_die_with_the_process_that_started_them(served: RouterProcess) -> None:
    pids = workers(served)
    served.process.kill()
    wait_gone(*pids)


def test_a_port_that_is_taken_is_said_in_one_line(lasting: RouterProcess) -> None:
    options = ["--port", str(lasting.port), "--replica", "http://127.0.0.1:1", *WORKERS]
    command = [sys.executable, "-m", "fleet", "router", *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == 1 and not ended.stdout
    said = (
        f"Error: cannot listen on 127.0.0.1:{lasting.port}: Address already in use; choose another --port or --host\n"
    )
    assert ended.stderr == said


def test_a_router_whose_workers_cannot_start_says_why_and_ends(tmp_path: Path) -> None:
    """Their second one has no port of its own for peers."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        peers = ["--peer-listen", f"tcp://127.0.0.1:{port - 1}", "--peer-keys", str(write_keys(str(tmp_path / "k"))[1])]
        options = ["--port", "0", "--replica", "http://127.0.0.1:1", *peers]
        command = [sys.executable, "-m", "fleet", "router", *options, *WORKERS]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == 1 and "router on" not in ended.stdout, ended
    assert f"cannot bind tcp://127.0.0.1:{port}: Address already in use" in ended.stderr
