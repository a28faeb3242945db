"""The commands and a real controller, over HTTP, with replicas that are ready at once."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator

import click
import pytest

from api.http.server import listen
from fleet.commands import down as down_module
from fleet.commands.change import restart, scale
from fleet.commands.client import FleetClient
from fleet.commands.down import down
from fleet.commands.drain import drain
from fleet.commands.logs import logs
from fleet.commands.status import status
from fleet.control.app import Serving
from fleet.control.controller import Controller, StateStore
from fleet.plan import Autoscale, FleetPlan, ModelPlan
from tests.events.processes import wait_until
from tests.fleet.ready_hosts import ReadyHosts
from tests.fleet.scripted import Ran, run

pytestmark = pytest.mark.usefixtures("noted_in")

KEY = "secret"
PLAN = FleetPlan(
    models=(
        ModelPlan(name="demo", model="demo", replicas=2),
        ModelPlan(name="org/grown", model="org/grown", replicas=1, autoscale=Autoscale(min=1, max=3)),
    )
)


class Controlled:
    """A controller on its own thread, until it is ended, or `close`."""

    def __init__(self, plan: FleetPlan) -> None:
        self.url = ""
        self._plan = plan
        self._there = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()))
        self._thread.start()
        assert self._there.wait(20)

    async def _serve(self) -> None:
        controller = Controller(ReadyHosts(), StateStore())
        controller.want(self._plan)
        serving = Serving(controller, listen("127.0.0.1", 0), KEY)
        await serving.start()
        self.url = serving.url
        self._there.set()
        waits = [asyncio.create_task(serving.ended()), asyncio.create_task(self._closing.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in waits:
            task.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        await serving.close()

    def close(self) -> None:
        if not self._loop.is_closed():
            if self._thread.is_alive():
                self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()
            self._loop.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(down_module, "GONE_S", 0.2)


@pytest.fixture
def controlled() -> Iterator[Controlled]:
    running = Controlled(PLAN)
    with FleetClient(running.url) as fleet:
        wait_until(lambda: fleet.view().complete)
    yield running
    running.close()


@pytest.fixture
def ask(controlled: Controlled) -> Callable[..., Ran]:
    def asked(command: click.Command, *arguments: str) -> Ran:
        return run(command, *arguments, WARMROUTE_FLEET=controlled.url, WARMROUTE_FLEET_KEY=KEY)

    return asked


def test_status_shows_what_the_controller_knows(ask: Callable[..., Ran]) -> None:
    ran = ask(status)
    assert ran.status == 0
    assert ran.lines[1:4] == ["demo  2 of 2 ready", "org/grown  1 of 1 ready", "  scaled automatically from 1 to 3"]
    assert [line.split()[0] for line in ran.lines[5:]] == ["replica", "demo-0", "demo-1", "org-grown-0"]
    assert "50% 8.0k" in ran.output
    assert {replica["name"] for replica in json.loads(ask(status, "--json").output)["replicas"]} == {
        "demo-0",
        "demo-1",
        "org-grown-0",
    }


def test_scaling_there_and_back(ask: Callable[..., Ran]) -> None:
    ran = ask(scale, "demo", "4")
    assert (ran.status, ran.lines[-1]) == (0, "demo: 4 of 4 ready")
    assert {"demo-2 is ready", "demo-3 is ready"} <= set(ran.lines)
    ran = ask(scale, "demo", "1")
    assert (ran.status, ran.lines[-1]) == (0, "demo: 1 of 1 ready")
    assert {"demo-1 is gone", "demo-2 is gone", "demo-3 is gone"} <= set(ran.lines)
    assert ask(scale, "demo", "0", "--yes").lines[-1] == "demo has no replicas"


def test_what_cannot_be_scaled_says_why(ask: Callable[..., Ran]) -> None:
    assert ask(scale, "other", "2").errors == "there is no model 'other'; there are demo, org/grown"
    assert ask(scale, "org/grown", "4").errors == "replicas is 4; org/grown scales from 1 to 3"
    assert ask(scale, "demo", "1001").errors == "replicas is 1001; make it a number from 0 to 1000"


@pytest.mark.parametrize("surge", [(), ("--surge",)])
def test_a_restart_renews_every_replica(ask: Callable[..., Ran], controlled: Controlled, surge: tuple[str]) -> None:
    with FleetClient(controlled.url) as fleet:
        before = {replica.incarnation for replica in fleet.view().of("demo")}
        ran = ask(restart, "demo", *surge)
        after = {replica.incarnation for replica in fleet.view().of("demo")}
    assert (ran.status, ran.lines[-1]) == (0, "All replicas of demo are new")
    assert "Restarting demo: 2 of 2" in ran.lines
    assert len(after) == 2 and not before & after


def test_drain_and_undo(ask: Callable[..., Ran], controlled: Controlled) -> None:
    assert ask(drain, "demo-1").status == 0
    with FleetClient(controlled.url) as fleet:
        assert [replica.life for replica in fleet.view().of("demo")] == ["ready", "draining"]
        assert ask(drain, "demo-1", "--undo").status == 0
        assert [replica.life for replica in fleet.view().of("demo")] == ["ready", "ready"]
    assert ask(drain, "demo-9").errors.startswith("there is no replica 'demo-9'; there are demo-0, demo-1")


def test_logs_come_from_the_replicas_host(ask: Callable[..., Ran]) -> None:
    assert ask(logs, "org-grown-0", "--lines", "1").output == "that it is there\n"
    assert ask(logs, "demo-9").errors.startswith("there is no replica 'demo-9'; there are demo-0, demo-1")


@pytest.mark.parametrize("key", [None, "wrong"])
def test_without_the_key_nothing_changes(controlled: Controlled, key: str | None) -> None:
    environment = {"WARMROUTE_FLEET": controlled.url} | ({"WARMROUTE_FLEET_KEY": key} if key else {})
    assert run(status, **environment).status == 0
    for command, arguments in ((scale, ["demo", "1"]), (restart, ["demo"]), (drain, ["demo-0"]), (logs, ["demo-0"])):
        ran = run(command, *arguments, **environment)
        assert ran.status == 1
        assert ran.errors.endswith("; give the fleet's key as WARMROUTE_FLEET_KEY")


def test_a_replica_that_cannot_start_shows_why(ask: Callable[..., Ran], controlled: Controlled) -> None:
    broken = ModelPlan(name="broken", model="broken", replicas=1)
    with FleetClient(controlled.url, KEY) as fleet:
        fleet.want(FleetPlan(models=(*PLAN.models, broken)))
        wait_until(lambda: [replica.life for replica in fleet.view().of("broken")] == ["failing"])
    ran = ask(status)
    assert ran.status == 1
    assert ran.lines[-2:] == ["broken-0 ended with status 1; restarting", "  | no such model"]


def test_down_by_url_ends_it(ask: Callable[..., Ran], controlled: Controlled) -> None:
    ran = ask(down)
    assert (ran.status, ran.lines[-1]) == (0, f"The fleet of {controlled.url} has ended")
    controlled.close()
