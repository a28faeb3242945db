"""A pool that is scaled to zero: the router holds requests until a replica is there, and counts them meanwhile."""

import json
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.chaos.replicas import command
from tests.chaos.routers import RouterProcess, router
from tests.events.processes import DEADLINE_S, wait_until
from tests.replica.serving import MODEL, Answer

pytestmark = [pytest.mark.chaos, pytest.mark.skipif(sys.platform != "linux", reason="starts processes as on Linux")]

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Is anybody there?"}], "max_tokens": 4}
EXPECTING = ("--expect-model", MODEL, "--queue-timeout", 60)


class Pool:
    """A router, and the file that names its replicas."""

    def __init__(self, file: Path, running: RouterProcess) -> None:
        self.file = file
        self.running = running

    def scale_to(self, *urls: str) -> None:
        tables = [f'[[replicas]]\nurl = "{url}"\n' for url in urls]
        self.file.write_text("".join(tables) or "# no replicas\n")

    def waiting(self) -> dict[str, float]:
        """The waiting requests that /metrics shows, of the whole router and by model."""
        text = self.running.get("/metrics").body.decode()
        rows = re.findall(r'^warmroute_router:(?:model_)?queue_length(?:\{model="(.*)"\})? (\S+)$', text, re.MULTILINE)
        return {model or "all": float(value) for model, value in rows}

    def ask(self, path: str = "/v1/chat/completions", **fields: object) -> Answer:
        return self.running.post(path, CHAT | fields)


@contextmanager
def pool(folder: Path, *options: object) -> Iterator[Pool]:
    """Start it without a replica."""
    file = folder / "replicas.toml"
    file.write_text("")
    with router("--replicas-file", file, *options, ready=False) as running:
        yield Pool(file, running)


@contextmanager
def asking(made: Pool, count: int = 1) -> Iterator[list[Future[Answer]]]:
    """Yield requests that wait."""
    with ThreadPoolExecutor(count) as threads:
        yield [threads.submit(made.ask) for _ in range(count)]


def test_a_request_waits_for_the_first_replica_and_is_counted(tmp_path: Path) -> None:
    """Its tokens are made when it is known whose they are, so that the prediction is exact."""
    with pool(tmp_path, *EXPECTING) as made:
        assert made.running.is_ready(), "a Service would send it nothing"
        assert made.waiting() == {"all": 0, MODEL: 0}
        client = HTTPConnection(made.running.host, made.running.port, timeout=DEADLINE_S)
        client.request("POST", "/v1/chat/completions", json.dumps(CHAT))
        wait_until(lambda: made.waiting() == {"all": 1, MODEL: 1}, "the request waits")
        client.close()
        wait_until(lambda: made.waiting()[MODEL] == 0, "its client has left")
        with asking(made) as [asked]:
            wait_until(lambda: made.waiting() == {"all": 1, MODEL: 1}, "the next one waits")
            assert b"\nwarmroute_router:open_requests 1.0\n" in made.running.get("/metrics").body
            with command() as replica:
                made.scale_to(replica.url)
                answer = asked.result(DEADLINE_S)
                assert answer.status == 200, answer.body
                assert answer.json["usage"]["completion_tokens"] == 4
                assert made.waiting() == {"all": 0, MODEL: 0}
                assert made.running.decisions(1)[0]["exact"]
                made.scale_to()
                wait_until(lambda: not made.running.get("/replicas").json["replicas"], "the pool is at zero again")
        assert made.running.is_ready()
        with asking(made) as [again]:
            wait_until(lambda: made.waiting()[MODEL] == 1, "it waits, too")
            with command() as replica:
                made.scale_to(replica.url)
                assert again.result(DEADLINE_S).status == 200


def test_the_wait_ends_after_the_queue_timeout_and_is_for_expected_models_only(tmp_path: Path) -> None:
    with pool(tmp_path, "--expect-model", MODEL, "--queue-timeout", 1) as made:
        answer = made.ask(model="another")
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")
        since_s = time.monotonic()
        answer = made.ask()
        assert (answer.status, answer.error["code"]) == (503, "no_replica")
        assert time.monotonic() - since_s >= 1
        assert made.waiting()[MODEL] == 0


def test_without_expecting_the_model_nothing_is_held(tmp_path: Path) -> None:
    with pool(tmp_path) as made:
        assert not made.running.is_ready()
        answer = made.ask()
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")
