"""Start and end of a replica: drained, at once, with its engine, with its parent; and nothing is left behind."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

import msgspec
import pytest

from api.native import FRAMES_TYPE
from tests.events.processes import wait_until
from tests.processes import is_alive
from tests.replica.serving import FAST, MODEL, SERVE, SLOW, Replica, config, is_listening, replica, running

GONE_WITHIN_S = 5.0
LONG = {"model": MODEL, "prompt": "hello", "max_tokens": 4000, "seed": 1, "ignore_eos": True}


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A place for temporary files; pytest's own has too long a name for the path of a socket."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


class Asking(threading.Thread):
    """A request on a thread of its own."""

    def __init__(self, served: Replica, **fields: Any) -> None:
        super().__init__()
        self.connection, self.response = served.open("POST", "/v1/completions", LONG | {"stream": True} | fields)
        self.body = b""
        self.failure: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            while piece := self.response.read1(65536):
                self.body += piece
        except (OSError, HTTPException) as failure:
            self.failure = failure

    def end(self) -> bytes:
        self.join(10)
        assert not self.is_alive(), "the stream hangs"
        self.connection.close()
        return self.body


def wait_gone(*pids: int) -> float:
    began_s = time.monotonic()
    wait_until(lambda: not any(map(is_alive, pids)), f"{pids} are gone")
    return time.monotonic() - began_s


def test_nothing_is_left_of_an_idle_replica_that_is_told_to_end(temporary: Path) -> None:
    with running(Replica(config(), TMPDIR=str(temporary))) as served:
        assert not list(temporary.iterdir())  # the socket's file is gone as soon as both ends have it
        engine, port = served.engine_pid, served.port
        assert served.end() == 0
        assert served.err == []
        assert not is_alive(engine)
        assert not is_listening(port)


def test_draining_finishes_what_runs_and_takes_nothing_new() -> None:
    with replica(SLOW) as served:
        asking = Asking(served, max_tokens=30)
        served.process.send_signal(signal.SIGTERM)
        wait_until(lambda: served.get("/ready").status == 503, "the replica drains")
        assert served.post("/tokenize", {"prompt": "x"}).status == 503
        refused = served.post("/v1/completions", LONG)
        assert b'warmroute:requests_refused_total{model_name="demo",reason="draining"} 1.0' in (
            served.get("/metrics").body
        )
        assert (refused.status, refused.error["code"]) == (503, "draining")
        assert int(refused.headers["retry-after"]) >= 1
        assert served.get("/health").status == 200
        assert served.load()["draining"] is True
        body = asking.end()
        assert body.endswith(b"data: [DONE]\n\n")
        assert body.count(b"data: ") == 31
        assert served.end(None) == 0


def test_a_second_signal_ends_at_once_and_tells_the_clients() -> None:
    with replica(SLOW) as served:
        asking = Asking(served)
        served.process.send_signal(signal.SIGINT)
        wait_until(lambda: served.load()["draining"], "the replica drains")
        began_s = time.monotonic()
        assert served.end(signal.SIGINT) == 0
        assert time.monotonic() - began_s < GONE_WITHIN_S
        assert b'"code":"engine_died"' in asking.end()


def test_a_drain_that_takes_too_long_is_cut() -> None:
    with replica(SLOW, {"drain_timeout_s": 0.2}) as served:
        asking = Asking(served)
        assert served.end() == 0
        assert "1 requests have not ended within 0.2 s" in "".join(served.err)
        assert asking.end().endswith(b"data: [DONE]\n\n")


def test_an_engine_that_says_nothing_makes_the_replica_not_ready() -> None:
    with replica(FAST) as served:
        assert served.get("/ready").status == 200
        os.kill(served.engine_pid, signal.SIGSTOP)
        wait_until(lambda: served.get("/ready").status == 503, "the silence is noticed")
        assert served.get("/ready").error["code"] == "engine_silent"
        assert served.load()["ready"] is False
        assert served.get("/health").status == 200
        os.kill(served.engine_pid, signal.SIGCONT)
        wait_until(lambda: served.get("/ready").status == 200, "the engine speaks again")


def test_the_replica_ends_with_its_engine_and_says_so_to_clients_and_breaks_off_to_routers() -> None:
    with replica(SLOW) as served:
        plain = Asking(served)
        connection, framed = served.open("POST", "/v1/completions", LONG | {"stream": True}, {"Accept": FRAMES_TYPE})
        assert framed.read1(10)
        whole = threading.Thread(target=lambda: answers.append(served.post("/v1/completions", LONG)))
        answers: list[Any] = []
        whole.start()
        wait_until(lambda: served.load()["load"]["running"] == 3, "three requests run")
        os.kill(served.engine_pid, signal.SIGKILL)
        assert wait_gone(served.process.pid) < GONE_WITHIN_S
        assert served.end(None) == 1
        assert served.err[-1] == "Error: the engine's process was killed by signal 9; the replica ends with it\n"
        assert not is_listening(served.port)
        assert b'"code":"engine_died"' in plain.end()
        with pytest.raises(HTTPException):  # the chunked body that routers read has no end
            framed.read()
        connection.close()
        whole.join()
        assert answers[0].status == 503


def test_the_engine_ends_with_the_http_process() -> None:
    with replica(SLOW) as served:
        asking = Asking(served)
        engine = served.engine_pid
        served.process.kill()
        assert wait_gone(engine) < GONE_WITHIN_S
        assert served.end(None) == -signal.SIGKILL
        assert not is_listening(served.port)
        asking.end()


def test_a_port_in_use_is_reported_in_one_line_and_no_engine_is_left() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        second = Replica(config(FAST, {"port": port}))
        assert second.end(None) == 1
    assert second.err == [
        f"Error: cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port or --host\n"
    ]


def test_an_engine_that_cannot_start_is_reported_without_a_traceback(temporary: Path) -> None:
    failed = Replica(config(num_blocks=1, block_size=1), TMPDIR=str(temporary))
    assert failed.end(None) == 1
    [line] = failed.err
    assert line.startswith("Error: the engine cannot start: ") and "raise --num-blocks" in line
    assert not list(temporary.iterdir())


@pytest.mark.parametrize(
    ("script", "status", "said"),
    [
        ("kill -INT $PPID $$", 0, []),  # a Ctrl-C that reaches the engine before it has a session of its own
        ("kill -KILL $$", 1, ["Error: the engine's process was killed by signal 9; the replica ends with it\n"]),
    ],
)
def test_the_end_of_an_engine_at_its_very_start_is_reported_once(script: str, status: int, said: list[str]) -> None:
    shell = f"engine_client.engine_command = lambda: ['/bin/sh', '-c', {script!r}]"
    command = f"from replica.http import engine_client; {shell}; {SERVE}"
    with subprocess.Popen(
        [sys.executable, "-c", command, msgspec.json.encode(config()).decode()], stderr=subprocess.PIPE, text=True
    ) as process:
        _, err = process.communicate(timeout=20)
    assert (process.returncode, err.splitlines(keepends=True)) == (status, said)


def test_a_path_that_is_too_long_for_a_socket_is_reported_with_the_fix(temporary: Path) -> None:
    deep = temporary / ("x" * 100)
    deep.mkdir()
    failed = Replica(config(), TMPDIR=str(deep))
    assert failed.end(None) == 1
    [line] = failed.err
    assert line.startswith("Error: ") and "set TMPDIR to a short path" in line
    assert not list(deep.iterdir())


def test_a_tokenizer_that_is_not_there_is_reported_with_its_name() -> None:
    failed = Replica(config(http={"tokenizer": "/nowhere"}))
    assert failed.end(None) == 1
    [line] = failed.err
    assert line.startswith("Error: ") and "/nowhere" in line
