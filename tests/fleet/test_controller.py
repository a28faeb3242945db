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
from fleet.control.controller import Controller
from fleet.control.here import Here
from fleet.control.memory import NoMemory
from fleet.control.serving import Serving
from fleet.plan import Autoscale, FleetPlan, ModelPlan
from fleet.plan import encode as encode_plan

DEADLINE_S = 20.0
METRICS_PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def plan(*models: str, **fields: Any) -> FleetPlan:
    return FleetPlan(models=tuple(ModelPlan(name=name, model="demo", engine="simulated", **fields) for name in models))


class Client:
    def __init__(self, url: str, key: str | None) -> None:
        headers = {"authorization": f"Bearer {key}"} if key else {}
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
    folder: Path, wanted: FleetPlan | None = None, key: str | None = None
) -> AsyncIterator[tuple[Client, Controller]]:
    hosts = Here(folder)
    running = Controller(hosts, NoMemory())
    if wanted is not None:
        running.want(wanted)
    serving = Serving(running, listen("127.0.0.1", 0), key)
    await serving.start()
    client = Client(serving.url, key)
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


async def test_routers_hear_at_once_who_dies_and_who_drains(tmp_path: Path) -> None:
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


async def test_members_are_unknown_before_anything_was_heard_of_them(tmp_path: Path) -> None:
    async with controller(tmp_path, plan("m")) as (client, running):
        answer = await client.http.get("/members")
        assert answer.status_code == 503 or not running.reconciler.members()
        async with asyncio.timeout(DEADLINE_S):
            while (await client.http.get("/members?wait=1")).status_code == 503:
                pass


async def test_a_new_plan_replaces_the_old_one(tmp_path: Path) -> None:
    async with controller(tmp_path, plan("a", "b")) as (client, _):
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
        for path, body, status, said in (
            ("/models/scale", {"model": "x", "replicas": 1}, 404, "there is no model 'x'; there are m, s"),
            ("/models/scale", {"model": "m", "replicas": -1}, 400, "replicas is -1"),
            ("/models/scale", {"model": "m", "replicas": "two"}, 400, "Expected `int`"),
            ("/models/scale", {"model": "m", "count": 2}, 400, "`count`"),
            ("/models/scale", {"model": "s", "replicas": 3}, 400, "s scales from 1 to 2"),
            ("/models/restart", {"model": "m", "surge": 2}, 400, "surge is 2; make it 0 or 1"),
            ("/replicas/drain", {"replica": "m-7"}, 404, "there is no replica 'm-7'"),
            ("/nowhere", {}, 404, "nowhere"),
        ):
            answer = await client.http.post(path, json=body)
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


async def test_only_those_with_the_key_change_a_fleet_that_has_one(tmp_path: Path) -> None:
    async with controller(tmp_path, plan("m", replicas=0), key="secret") as (client, _):
        del client.http.headers["authorization"]
        for path in ("/models/scale", "/models/restart", "/replicas/drain", "/end"):
            assert (await client.http.post(path, json={})).status_code == 401
        assert (await client.http.put("/fleet", content=b"{}")).status_code == 401
        assert (await client.http.get("/replicas/log?replica=m-0")).status_code == 401
        assert (await client.http.get("/fleet")).status_code == 200
        assert (await client.http.get("/members?wait=0")).status_code == 200
        client.http.headers["authorization"] = "Bearer secret"
        assert (await client.post("/models/scale", model="m", replicas=0)).status_code == 200


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


@pytest.mark.parametrize("client_host", ["10.0.0.9", "127.0.0.1"])
async def test_without_a_key_only_this_machine_changes_a_fleet(client_host: str, tmp_path: Path) -> None:
    from fleet.control.app import build_app

    app = build_app(Controller(Here(tmp_path), NoMemory()), None)
    transport = httpx2.ASGITransport(app, client=(client_host, 1))
    async with httpx2.AsyncClient(transport=transport, base_url="http://fleet") as http:
        answer = await http.post("/end", json={})
        assert answer.status_code == (202 if client_host == "127.0.0.1" else 403)
        assert client_host == "127.0.0.1" or "WARMROUTE_FLEET_KEY" in answer.json()["error"]["message"]
        assert (await http.get("/fleet")).status_code == 200
