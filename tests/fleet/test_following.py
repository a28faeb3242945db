"""`warmroute up --follow` with a Ray that comes and goes: when plans are sent, and which messages appear once."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import click
import pytest

from fleet.on_ray.orders import Launched
from fleet.plan import FleetPlan, ModelPlan
from fleet.up import following, watching
from fleet.up.following import Following
from fleet.up.launching import OnRay
from fleet.up.watching import CannotStart
from router.members.watched_file import WatchedFile
from tests.fleet.scripted import Script, calm, refusal, serving
from tests.router.loopback import until


class Ray(OnRay):
    """A cluster that can be joined any number of times, unless it is away."""

    clean = True
    holds = False
    retries = 0.0
    away_s = 0.0

    def __init__(self, *controllers: str) -> None:
        self.controllers = list(controllers)  # the last one for ever
        self.plans: list[FleetPlan] = []
        self.away = ""
        self.closed = False

    async def start(self, plan: FleetPlan, *, again: bool = False) -> Launched:
        assert not again, "unexpected relaunch"
        if self.away:
            raise CannotStart(self.away)
        self.plans.append(plan)
        controller = self.controllers.pop(0) if len(self.controllers) > 1 else self.controllers[0]
        return Launched(controller=controller, found=len(self.plans) > 1)

    async def failed(self) -> str:
        raise AssertionError("nobody asks")

    async def close(self) -> None:
        self.closed = True

    def kill(self) -> None: ...


class Followed:
    """A file that contains only a number of replicas, and its follower."""

    def __init__(self, ray: Ray, file: Path) -> None:
        self.ray, self.file, self.said = ray, file, list[str]()
        self.write("1")
        self.following = Following(self.read(), WatchedFile(str(file)), self.read, ray, "the-key", self.said.append)
        self.task = asyncio.create_task(self.following.run())

    def write(self, text: str) -> None:
        self.file.write_text(text)

    def read(self) -> FleetPlan:
        try:
            count = int(self.file.read_text())
        except ValueError as error:
            raise click.UsageError("that is no number") from error
        return FleetPlan(models=(ModelPlan(name="m", model="demo", replicas=count),))

    async def until_said(self, words: str) -> None:
        await until(lambda: any(words in line for line in self.said), f"{words!r} is said")


@asynccontextmanager
async def followed(ray: Ray, folder: Path) -> AsyncIterator[Followed]:
    it = Followed(ray, folder / "fleet.toml")
    try:
        yield it
    finally:
        it.task.cancel()
        await asyncio.gather(it.task, return_exceptions=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"LOOK_S": 0.01, "AGAIN_S": 0.01, "AWAY_S": 0.1}.items():
        monkeypatch.setattr(following, name, seconds)
    monkeypatch.setattr(watching, "LOOK_S", 0.01)


def counts(plans: list[FleetPlan]) -> list[int]:
    return [plan.models[0].replicas for plan in plans]


async def test_a_change_of_the_file_is_handed_over_and_a_mistake_in_it_is_not(tmp_path: Path) -> None:
    with serving(Script(calm(1))) as controller:
        async with followed(Ray(controller.url), tmp_path) as it:
            await it.until_said(f"The fleet begins; routers find it with --registry {controller.url}")
            it.write("22")
            await it.until_said("has changed, and the fleet has the new plan")
            it.write("many")
            await it.until_said("The fleet stays as it was: that is no number")
        assert [(path, body["models"][0]["replicas"]) for path, body in controller.changes] == [("/fleet", 22)]
        assert controller.asked[-1].key == "Bearer the-key"
        assert counts(it.ray.plans) == [1], "the command joined Ray more than once"


async def test_a_plan_that_the_controller_refuses_changes_nothing(tmp_path: Path) -> None:
    with serving(Script(calm(1))) as controller:
        async with followed(Ray(controller.url), tmp_path) as it:
            await it.until_said("The fleet begins")
            controller.answers["PUT /fleet"] = refusal(401, "the key is missing")
            it.write("22")
            await it.until_said("give the fleet's key as WARMROUTE_FLEET_KEY")
            await until(lambda: len(controller.asked) > 20, "it looks on")
            assert len(controller.changes) == 1, "a refused plan is not sent again"


async def test_a_plan_that_could_not_be_handed_over_is_handed_over_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "AWAY_S", 60.0)  # refusals are no absence, however slowly they come
    with serving(Script(calm(1))) as controller:
        async with followed(Ray(controller.url), tmp_path) as it:
            await it.until_said("The fleet begins")
            controller.answers["PUT /fleet"] = refusal(503, "not now")
            it.write("22")
            await until(lambda: len(controller.changes) > 3, "it retries again")
            del controller.answers["PUT /fleet"]
            await it.until_said("has changed, and the fleet has the new plan")


async def test_while_ray_is_away_the_file_is_read_again(tmp_path: Path) -> None:
    with serving(Script(calm(1))) as controller:
        ray = Ray(controller.url)
        ray.away = "no Ray answers"
        async with followed(ray, tmp_path) as it:
            await it.until_said("no Ray answers; trying again")
            it.write("many")
            await it.until_said("The fleet stays as it was: that is no number")
            it.write("22")
            await until(lambda: counts([it.following.plan]) == [22], "it has read the file")
            ray.away = ""
            await it.until_said("The fleet begins")
        assert counts(ray.plans) == [22]


async def test_without_a_controller_the_fleet_restarts_with_the_newest_plan(tmp_path: Path) -> None:
    with serving(Script(calm(1))) as second:
        with serving(Script(calm(1))) as first:
            ray = Ray(first.url, second.url)
            async with followed(ray, tmp_path) as it:
                await it.until_said("The fleet begins")
                it.write("3")
                await it.until_said("has the new plan")
                first.views = [calm(2)]
                ray.away = "no Ray answers"
                await asyncio.to_thread(first.stop)
                await it.until_said("no Ray answers; trying again")
                ray.away = ""
                await it.until_said(
                    f"The fleet was there, and has the plan; routers find it with --registry {second.url}"
                )
        assert counts(ray.plans) == [1, 3]
        assert sum("no Ray answers" in line for line in it.said) == 1, "the message is printed once"


async def test_a_signal_ends_it_and_not_the_fleet(tmp_path: Path) -> None:
    with serving(Script(calm(1))) as controller:
        async with followed(Ray(controller.url), tmp_path) as it:
            await it.until_said("The fleet begins")
            os.kill(os.getpid(), signal.SIGTERM)
            await it.task
        assert it.said[-1] == "The fleet goes on." and it.ray.closed
        assert controller.changes == []
