"""A local Ray's servers are watched: a GCS that dies or hangs is started again, and not for ever."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from fleet.on_ray import watchdog
from fleet.on_ray.local import GCS, RAYLET
from fleet.on_ray.watchdog import MAX_STARTS, RayWatchdog
from tests.router.loopback import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs pidfd_open")


class Ray:
    """Processes that do nothing in the places of its servers."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.said: list[str] = []
        self.gcs, self.raylet = self.start(), self.start()
        self.keeping = RayWatchdog({GCS: self.gcs, RAYLET: self.raylet}, lambda: None, self.said.append)

    def start(self) -> int:
        self.processes.append(subprocess.Popen(["sleep", "60"]))
        return self.processes[-1].pid

    def start_gcs_again(self) -> int:
        self.gcs = self.start()
        return self.gcs

    def is_another(self, gcs: int) -> bool:
        return self.gcs != gcs


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ray]:
    made = Ray()
    monkeypatch.setenv("RAY_gcs_storage", "rocksdb")
    monkeypatch.setattr(watchdog, "start_gcs_again", made.start_gcs_again)
    monkeypatch.setattr(watchdog, "LOOK_S", 0.01)
    answers(monkeypatch, lambda _: True)
    yield made
    for process in made.processes:
        process.kill()
        process.wait()


def answers(monkeypatch: pytest.MonkeyPatch, raylet_lives: Callable[[float], bool | None]) -> None:
    monkeypatch.setattr(watchdog, "raylet_lives", raylet_lives)


async def over(ray: Ray) -> str:
    async with asyncio.timeout(20):
        return await ray.keeping.until_over()


async def test_the_end_of_the_raylet_is_the_end(ray: Ray) -> None:
    os.kill(ray.raylet, signal.SIGKILL)
    assert await over(ray) == RAYLET
    assert len(ray.processes) == 2


async def test_a_gcs_is_started_again_and_not_for_ever(ray: Ray) -> None:
    waiting = asyncio.create_task(over(ray))
    for _ in range(MAX_STARTS):
        before = ray.gcs
        os.kill(before, signal.SIGKILL)
        await until(partial(ray.is_another, before), "there is another one")
    assert not waiting.done()
    os.kill(ray.gcs, signal.SIGKILL)
    assert await waiting == GCS
    assert len(ray.processes) == 2 + MAX_STARTS


async def test_without_a_store_the_end_of_the_gcs_is_the_end(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_gcs_storage")
    os.kill(ray.gcs, signal.SIGKILL)
    assert await over(ray) == GCS


async def test_a_gcs_whose_log_cannot_be_made_is_the_end(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(watchdog, "start_gcs_again", full)
    os.kill(ray.gcs, signal.SIGKILL)
    assert await over(ray) == GCS
    assert "No space left on device" in ray.said[-1]


async def test_a_gcs_that_hangs_is_killed_and_started_again(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ray.gcs
    answers(monkeypatch, lambda _: None if ray.gcs == first else True)
    waiting = asyncio.create_task(over(ray))
    await until(partial(ray.is_another, first), "there is another one")
    assert ray.processes[0].wait(10) == -signal.SIGKILL
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_a_raylet_that_is_given_up_is_the_end(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, lambda _: False)
    assert (await over(ray)).startswith(RAYLET)
