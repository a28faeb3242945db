"""A whole controller over HTTP, with real replicas as processes of this machine."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from api.http.server import listen
from fleet.control import app as control_app
from fleet.control import controller as control
from fleet.control.app import Serving
from fleet.control.controller import Controller, StateStore
from fleet.control.hosts import Host, HostGone, LocalHosts
from fleet.host.report import Report
from fleet.plan import Autoscale, FleetPlan, ModelPlan, Task
from fleet.plan import encode as encode_plan
from tests.fleet.ready_hosts import ReadyHosts

DEADLINE_S = 50.0
KEY = "secret"
METRICS_PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def plan(*models: str, **fields: Any) -> FleetPlan:
    return FleetPlan(models=tuple(ModelPlan(name=name, model="demo", engine="simulated", **fields) for name in models))


class Client:
    """It sends the key, until a test takes it away."""

    def __init__(self, url: str) -> None:
        headers = {"authorization": f"Bearer {KEY}"}
        self.http = httpx2.AsyncClient(base_url=url, timeout=DEADLINE_S, trust_env=False, headers=headers)

    async def get(self, path: str) -> Any:
        answer = await self.http.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def post(self, path: str, **body: Any) -> httpx2.Response:
        return await self.http.post(path, json=body)

    async def until(self, holds: Callable[[Any], bool]) -> Any:
        async with asyncio.timeout(DEADLINE_S):
            while not holds(view := await self.get("/fleet")):
                await asyncio.sleep(0.05)
        return view

    async def ready(self, count: int) -> Any:
        return await self.until(lambda view: [each["life"] for each in view["replicas"]] == ["ready"] * count)


@asynccontextmanager
async def controller(
    folder: Path, wanted: FleetPlan | None = None, hosts: LocalHosts | ReadyHosts | None = None
) -> AsyncIterator[tuple[Client, Controller]]:
    hosts = hosts or LocalHosts(folder)
    running = Controller(hosts, StateStore())
    if wanted is not None:
        running.want(wanted)
    serving = Serving(running, listen("127.0.0.1", 0), KEY)
    await serving.start()
    client = Client(serving.url)
    try:
        yield client, running
        running.reconciler.end()
        running.look()
        async with asyncio.timeout(DEADLINE_S):
            await serving.ended()
    finally:
        hosts.kill()
        await client.http.aclose()
        await serving.close()


async def test_a_fleet_is_begun_scaled_restarted_and_ended(tmp_path: Path) -> None:
    async with controller(tmp_path, plan("m")) as (client, running):
        view = await client.ready(1)
        [old] = view["replicas"]
        assert (await client.post("/models/scale", model="m", replicas=2)).json()["wanted"] == 2
        await client.ready(2)
        restarted = (await client.post("/models/restart", model="m")).json()
        assert restarted["restarting"] and restarted["generation"] == 1
        view = await client.until(lambda view: not view["models"][0]["restarting"] and view["models"][0]["ready"] == 2)
        assert {each["name"] for each in view["replicas"]} == {"m-0", "m-1"}
        assert old["incarnation"] not in {each["incarnation"] for each in view["replicas"]}
        await client.post("/models/scale", model="m", replicas=0)
        await client.until(lambda view: view["replicas"] == [])
        assert (await client.get("/members"))["members"] == []
        assert running.replaced == 0


async def test_routers_hear_of_deaths_and_drains_at_once(tmp_path: Path) -> None:
    async with controller(tmp_path, plan("m", replicas=2)) as (client, _):
        view = await client.ready(2)
        known = await client.get("/members")
        assert {member["name"]: member["draining"] for member in known["members"]} == {"m-0": False, "m-1": False}

        async def next_members() -> Any:
            nonlocal known
            known = await client.get(f"/members?wait=20&after={known['version']}")
            return {member["name"]: member["draining"] for member in known["members"]}

        waiting = asyncio.create_task(next_members())
        os.kill(view["replicas"][0]["pid"], signal.SIGKILL)
        assert await waiting == {"m-1": False}
        assert await next_members() == {"m-0": False, "m-1": False}  # it is there again
        waiting = asyncio.create_task(next_members())
        assert (await client.post("/replicas/drain", replica="m-1")).status_code == 200
        assert await waiting == {"m-0": False, "m-1": True}
        waiting = asyncio.create_task(next_members())
        await client.post("/replicas/drain", replica="m-1", drain=False)
        assert await waiting == {"m-0": False, "m-1": False}
        waiting = asyncio.create_task(next_members())
        drained = await client.post("/nodes/drain", node=view["replicas"][0]["node"])
        assert drained.json() == {"replicas": ["m-0", "m-1"]}
        assert await waiting == {"m-0": True, "m-1": True}


async def test_neither_members_nor_nodes_are_known_before_anything_was_heard_of_replicas(tmp_path: Path) -> None:
    hosts = ReadyHosts()
    hosts.speak.clear()
    async with controller(tmp_path, plan("m"), hosts) as (client, _):
        assert (await client.http.get("/members")).status_code == 503
        answer = await client.post("/nodes/drain", node="10.0.0.7")
        assert answer.json()["error"]["code"] == "not_known"
        hosts.speak.set()
        async with asyncio.timeout(DEADLINE_S):
            while (await client.http.get("/members?wait=1")).status_code == 503:
                pass
        await client.ready(1)
        assert (await client.post("/nodes/drain", node="10.0.0.7")).json() == {"replicas": []}


async def test_a_new_plan_replaces_the_old_one(tmp_path: Path) -> None:
    async with controller(tmp_path, plan("a", "b"), ReadyHosts()) as (client, _):
        await client.ready(2)
        answer = await client.http.put("/fleet", content=encode_plan(plan("b", "c")))
        assert answer.status_code == 200
        view = await client.until(
            lambda view: (
                [(each["name"], each["life"]) for each in view["replicas"]] == [("b-0", "ready"), ("c-0", "ready")]
            )
        )
        assert [model["name"] for model in view["models"]] == ["b", "c"]


async def test_mistakes_are_answered_with_what_to_do(tmp_path: Path) -> None:
    bounded = plan("m", replicas=0)
    scaled = ModelPlan(name="s", model="demo", engine="simulated", replicas=0, autoscale=Autoscale(min=1, max=2))
    bounded = msgspec.structs.replace(bounded, models=(*bounded.models, msgspec.structs.replace(scaled, replicas=1)))
    async with controller(tmp_path, bounded) as (client, _):
        for path, sent, status, said in (
            ("/models/scale", {"model": "x", "replicas": 1}, 404, "there is no model 'x'; there are m, s"),
            ("/models/scale", {"model": "m", "replicas": -1}, 400, "replicas is -1"),
            ("/models/scale", {"model": "m", "replicas": "two"}, 400, "expected `int`"),
            ("/models/scale", {"model": "m", "count": 2}, 400, "`count`"),
            ("/models/scale", {"model": "s", "replicas": 3}, 400, "s scales from 1 to 2"),
            ("/models/restart", {"model": "m", "surge": 2}, 400, "surge is 2; make it 0 or 1"),
            ("/replicas/drain", {"replica": "m-7"}, 404, "there is no replica 'm-7'"),
            ("/nowhere", {}, 404, "nowhere"),
        ):
            answer = await client.http.post(path, json=sent)
            assert (answer.status_code, said in answer.json()["error"]["message"]) == (status, True), answer.text
        for path, status in (
            ("/members?wait=soon", 400),
            ("/members?after=x", 400),
            ("/replicas/log?replica=m-9", 404),
            ("/replicas/log?replica=m-9&lines=-1", 400),
        ):
            assert (await client.http.get(path)).status_code == status
        twice = encode_plan(plan("m", "m"))
        assert (await client.http.put("/fleet", content=twice)).status_code == 400
        assert (await client.http.put("/fleet", content=b"{")).status_code == 400
        assert (await client.http.put("/fleet", content=b" " * (control_app.MAX_BYTES + 1))).status_code == 413


async def test_parts_of_logs_are_only_for_those_with_the_key(tmp_path: Path) -> None:
    async with controller(tmp_path, plan("m"), ReadyHosts()) as (client, _):
        await client.ready(1)
        [shown] = (await client.get("/fleet"))["replicas"]
        assert (shown["last_words"], shown["notes"]) == (["--api-key abc"], ["Note: abc"])
        del client.http.headers["authorization"]
        [shown] = (await client.get("/fleet"))["replicas"]
        assert (shown["last_words"], shown["notes"], shown["life"]) == ([], [], "ready")
        client.http.headers["authorization"] = f"Bearer {KEY}"


async def test_nothing_else_is_served(tmp_path: Path) -> None:
    async with controller(tmp_path, plan("m", replicas=0)) as (client, _):
        for path, status in (("/openapi.json", 404), ("/docs", 404), ("/fleet/", 400)):
            assert (await client.http.get(path)).status_code == status
        answer = await client.http.post("/fleet", json={})
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD, PUT")


BAD_PLANS: list[tuple[dict[str, Any], str]] = [
    ({"name": "n" * 300}, "models[0].name is"),
    ({"name": ""}, 'models[0].name is ""'),
    ({"name": "a\nb"}, "'a\\nb' has a character that cannot be printed"),
    ({"replicas": -3}, "models[0].replicas is -3"),
    ({"replicas": 10**8}, "models[0].replicas is 100000000"),
    ({"drain_timeout_s": -1.0}, "models[0].drain_timeout_s is -1.0"),
    ({"wedged_after_s": 0.0}, "models[0].wedged_after_s is 0.0"),
    ({"tensor_parallel": 0}, "models[0].tensor_parallel is 0"),
    ({"resources": {"gpus": -0.5}}, "models[0].resources.gpus is -0.5"),
    ({"resources": {"custom": {"tpu": -1}}}, "models[0].resources.custom"),
    ({"autoscale": {"min": 0, "max": 2}}, "models[0].autoscale.min is 0"),
    ({"autoscale": {"min": 1, "max": 99_999_999}}, "models[0].autoscale.max is 99999999"),
    ({"autoscale": {"min": 3, "max": 2}}, "m is to scale from 3 to 2; make max 3 or more"),
    ({"autoscale": {"min": 1, "max": 2, "ttft_target_s": 1e-320}}, "models[0].autoscale.ttft_target_s is 1e-320"),
]


async def test_a_plan_that_nothing_could_run_is_refused_with_the_value_that_is_wrong(tmp_path: Path) -> None:
    async with controller(tmp_path, plan("m", replicas=0)) as (client, running):
        for wrong, said in BAD_PLANS:
            answer = await client.http.put("/fleet", json={"models": [{"name": "m", "model": "demo", **wrong}]})
            assert (answer.status_code, said in answer.json()["error"]["message"]) == (400, True), answer.text
        endless = b'{"models": [{"name": "m", "model": "demo", "drain_timeout_s": 1e999}]}'
        answer = await client.http.put("/fleet", content=endless)
        assert "models[0].drain_timeout_s cannot be read; number out of range" in answer.json()["error"]["message"]
        assert running.reconciler.plan == plan("m", replicas=0)


# ---- hosts


async def test_a_replica_that_cannot_be_begun_says_why_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "BEGIN_AGAIN_S", 0.05)
    hosts = ReadyHosts(broken="m-0")
    async with controller(tmp_path, plan("m", replicas=2), hosts) as (client, _):
        view = await client.until(lambda view: [each["life"] for each in view["replicas"]] == ["lost", "ready"])
        assert view["replicas"][0]["why"] == "it cannot be begun: [Errno 28] No space left on device"
        assert (await client.http.get("/replicas/log?replica=m-0")).status_code == 503
        hosts.broken = ""
        await client.ready(2)


class Dying:
    """Hosts whose `stop` waits for permission; hosts in `dead` are gone and can be replaced."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.dead = asyncio.Event()
        self.stopping = asyncio.Event()
        self.may_stop = asyncio.Event()

    def begin(self, task: Task) -> Host:
        self.begun.append(task.name)
        return DyingHost(self, task.name)

    async def there(self) -> list[str]:
        return []

    async def missing(self, task: Task) -> str | None:  # noqa: ARG002
        return None


class DyingHost:
    def __init__(self, hosts: Dying, name: str) -> None:
        self.hosts = hosts
        self.name = name

    async def report(self, after: tuple[str, int] | None) -> Report:
        if after is not None:
            await self.hosts.dead.wait()
            raise HostGone("it has ended")
        return Report(name=self.name, host="h", life="ready")

    async def stop(self, limit_s: float) -> None:  # noqa: ARG002
        self.hosts.stopping.set()
        await self.hosts.may_stop.wait()

    async def log(self, lines: int) -> str:  # noqa: ARG002
        return ""


async def test_a_replica_that_is_told_to_leave_just_after_its_host_is_gone_is_gone_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control, "AGAIN_S", 0.1)
    hosts = Dying()
    running = Controller(hosts, StateStore())
    running.want(plan("m"))
    loop = asyncio.create_task(running.run())
    async with asyncio.timeout(DEADLINE_S):
        while running.reconciler.replicas.get("m-0") is None or not running.reconciler.replicas["m-0"].ready:
            await asyncio.sleep(0.01)
        hosts.dead.set()
        await asyncio.sleep(0)  # the one that follows it hears of that, and pauses
        running.reconciler.scale("m", 0)
        running.look()
        await hosts.stopping.wait()
        following = [task for task in asyncio.all_tasks() if "_follow" in repr(task.get_coro())]
        await asyncio.gather(*following)  # its pause is over
        running.reconciler.scale("m", 1)
        running.look()
        while hosts.begun != ["m-0", "m-1"]:
            await asyncio.sleep(0.01)
        assert running.replaced == 0 and running.reconciler.replicas["m-0"].leaving
        hosts.may_stop.set()
        while "m-0" in running.reconciler.replicas:
            await asyncio.sleep(0.01)
    assert list(running.reconciler.replicas) == ["m-1"] and not loop.done()
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)


async def test_the_log_of_a_replica_and_the_metrics_can_be_read(tmp_path: Path) -> None:
    async with controller(tmp_path, plan("m")) as (client, _):
        await client.ready(1)
        log = await client.http.get("/replicas/log?replica=m-0&lines=5")
        assert "ready on http://127.0.0.1:" in log.text
        metrics = (await client.http.get("/metrics")).text
        assert 'warmroute_fleet:replicas{life="ready",model="m"} 1.0' in metrics
        page = METRICS_PAGE.read_text()
        shown = {line.split()[2] for line in metrics.splitlines() if line.startswith("# TYPE")}
        documented = {word for word in page.split("`") if word.startswith("warmroute_fleet:")}
        assert shown == documented
