"""File descriptors run out in a router or a replica: others are answered, no replica is blamed, the cause is logged."""

import json
import resource
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException

import pytest

from tests.chaos.replicas import Command, command, open_files
from tests.chaos.routers import router
from tests.events.processes import wait_until
from tests.replica.serving import MODEL, Replica

pytestmark = [pytest.mark.chaos, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

AT_ONCE = 24
BODY = json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 32})
QUICK = ("--set=simulated_decode_tokens_per_s=50",)


@contextmanager
def without_files(process: Replica, left: int = 0) -> Iterator[None]:
    """Leave the process this many file descriptors."""
    pid = process.process.pid
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (open_files(pid) + left, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def connections(process: Replica, count: int) -> Iterator[list[HTTPConnection]]:
    """Connections that were used once."""
    made = [HTTPConnection("127.0.0.1", process.port, timeout=10) for _ in range(count)]
    try:
        for connection in made:
            connection.request("GET", "/health")
            connection.getresponse().read()
        yield made
    finally:
        for connection in made:
            connection.close()


def posted(connection: HTTPConnection) -> int:
    connection.request("POST", "/v1/completions", BODY, {"content-type": "application/json"})
    response = connection.getresponse()
    response.read()
    return response.status


def test_a_router_without_file_descriptors_blames_no_replica() -> None:
    with command(*QUICK) as replica, router("--replica", f"url={replica.url},name=r", "--queue-timeout", 1) as running:
        with connections(running, AT_ONCE) as clients, without_files(running), ThreadPoolExecutor(AT_ONCE) as threads:
            statuses = list(threads.map(posted, clients))
        assert set(statuses) <= {200, 503} and 503 in statuses
        status = running.status_of("r")
        assert (status["available"], status["breaker"]) == (True, "closed")
        assert running.post("/v1/completions", json.loads(BODY)).status == 200
        assert b'faults_total{replica="r"} 0.0' in running.get("/metrics").body


@pytest.mark.parametrize("whose", ["router", "replica"])
def test_connections_that_take_all_file_descriptors_end_nothing(whose: str) -> None:
    with command(*QUICK) as replica, router("--replica", f"url={replica.url},name=r") as running:
        process: Replica | Command = running if whose == "router" else replica
        with without_files(process, left=4):
            crowd = [HTTPConnection("127.0.0.1", process.port, timeout=1) for _ in range(20)]
            for connection in crowd:
                with suppress(OSError, HTTPException):
                    connection.connect()
            for connection in crowd:
                connection.close()
            wait_until(lambda: _answers(process), "it answers again")
        assert process.process.poll() is None
        wait_until(lambda: running.post("/v1/completions", json.loads(BODY)).status == 200, "requests are answered")


def _answers(process: Replica) -> bool:
    try:
        return process.get("/health").status == 200
    except (OSError, HTTPException):
        return False
