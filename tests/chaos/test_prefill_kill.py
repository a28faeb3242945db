"""The replica that computes prompts for others is killed, again and again, under load: no request fails."""

import asyncio
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.replicas import free_ports
from tests.router.loopback import until
from tests.router.proxy.nixl_peer import Engine, Fabric
from tests.router.proxy.test_prefill import PATHS, WORDS, body
from tests.router.scripted import Answer, connect, served

REQUESTS = 120
CLIENTS = 12
KILLS = 3


class Process(Engine):
    """An engine in a process of its own, on a port that it keeps."""

    def __init__(self, name: str, role: Any, folder: Path, seconds: float) -> None:
        super().__init__(name, Fabric(), role)
        self.port = free_ports(1)
        arguments = (name, role, str(self.port), str(folder), str(seconds))
        self._command = [sys.executable, "-m", "tests.router.proxy.nixl_peer", *arguments]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE)
        assert self.process.stdout is not None and self.process.stdout.readline() == b"ready\n"

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def engines(folder: Path) -> Iterator[tuple[Process, Process]]:
    running: list[Process] = []
    try:
        for name, role, seconds in (("prefill", "prefill", 0.01), ("decode", "decode", 0.002)):
            running.append(Process(name, role, folder, seconds))
        yield running[0], running[1]
    finally:
        for one in running:
            one.kill()


def _has(answered: list[Answer], count: int) -> bool:
    return len(answered) >= count


@pytest.mark.chaos
async def test_nothing_fails_when_the_prefill_replica_is_killed(tmp_path: Path) -> None:
    answered: list[Answer] = []

    async def client(port: int, number: int) -> None:
        async with connect(port) as connection:
            for turn in range(REQUESTS // CLIENTS):
                path, streams = PATHS[(number + turn) % len(PATHS)], turn % 2 == 0
                asked = body(path, f"{number} {turn} {WORDS}", stream=streams)
                answered.append(await connection.post(path, asked))

    config: dict[str, Any] = {"policy": "cost", "prefill_elsewhere": "always", "health_interval_s": 0.1}
    with engines(tmp_path) as (prefill, decode):
        async with served(prefill, decode, **config) as running:
            clients = [asyncio.create_task(client(running.port, number)) for number in range(CLIENTS)]
            for kill in range(KILLS):
                soon = 20 * (kill + 1)
                await until(partial(_has, answered, soon), "some are answered")
                await asyncio.to_thread(prefill.kill)
                running.member("prefill").no_prefill_until_s = 0.0
                await asyncio.to_thread(prefill.start)
            await asyncio.gather(*clients)
            await running.idle()
            outcomes = Counter(running.member("prefill").prefills)
            decided = [one.record() for one in running.router.history.decisions]
    assert [answer.status for answer in answered] == [200] * REQUESTS
    assert {answer.headers["x-warmroute-replica"] for answer in answered} == {"decode"}
    assert all(b"decode" in answer.body and b"error" not in answer.body for answer in answered)
    assert outcomes["handed"] and outcomes["lost"], outcomes
    assert len(decided) == REQUESTS
