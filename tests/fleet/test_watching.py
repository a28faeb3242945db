"""Messages about a fleet that is lost and begun again; its controller's answers are scripted."""

import asyncio
from contextlib import suppress
from typing import Any

import click
import pytest

from fleet.control.record import ModelView, ReplicaView, View
from fleet.up.watching import Watcher


def ready(starts: int = 1, last_words: tuple[str, ...] = ()) -> View:
    replica = ReplicaView(name="demo-0", model="demo", life="ready", starts=starts, last_words=last_words)
    return View(models=(ModelView(name="demo"),), replicas=(replica,))


READY = ready()


class ScriptOver(Exception):
    pass


class Controller:
    def __init__(self, *answers: View | None) -> None:
        self._answers = list(answers)

    def view(self) -> View:
        if not self._answers:
            raise ScriptOver
        answer = self._answers.pop(0)
        if answer is None:
            raise click.ClickException("it does not answer")
        return answer


def watching(said: list[str], *answers: View | None) -> Watcher:
    controller: Any = Controller(*answers)
    return Watcher(controller, said.append)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet.up.watching.LOOK_S", 0.0)


async def follow(watcher: Watcher) -> None:
    with suppress(ScriptOver):
        await watcher.follow()


async def test_a_replica_that_is_begun_again_is_told_of_again() -> None:
    said: list[str] = []
    watcher = watching(said, READY, None, READY)
    await watcher.look()
    assert said == ["demo-0 is ready"]
    watcher.lost()
    await follow(watcher)
    assert said[1:] == [said[1], "demo-0 is ready", "The controller is back"]
    assert said[1].startswith("The controller is away")


async def test_a_replica_that_dies_and_is_ready_again_between_two_looks_is_told_of() -> None:
    said: list[str] = []
    watcher = watching(said, READY, ready(starts=2, last_words=("out of memory",)), ready(starts=2))
    await follow(watcher)
    assert said == [
        "demo-0 is ready",
        "demo-0 has ended",
        "  | out of memory",
        "demo-0 is ready again",
    ]
    assert watcher.failed


async def test_a_fleet_that_was_begun_again_has_its_own_time_to_answer() -> None:
    watcher = watching([], None)
    await follow(watcher)
    watcher._away_since_s = 0.0  # long ago
    async with asyncio.timeout(5):
        await watcher.away_for(10.0)
    watcher.begun_again()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await watcher.away_for(10.0)
