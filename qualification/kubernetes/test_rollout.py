"""A deployment is rolled by Kubernetes' own controllers: members follow within a second, every request is answered."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx2
import pytest

from qualification.kubernetes.real import MERGE, RealApi, checked, needing_a_cluster, real_api
from router.config import Kubernetes
from tests.router.kubernetes_api import PODS, SPACE, Object, pod
from tests.router.scripted import CHAT, Scripted, Served, chat, connect, named, served

pytestmark = needing_a_cluster("kube-controller-manager")

SOON_S = 3.0  # a second is what is promised; a machine with other tests on it may add to that
COUNT = 3
STARTS_S = 0.3
ENDS_S = 0.5  # what a preStop hook waits
DEPLOYMENTS = f"/apis/apps/v1/namespaces/{SPACE}/deployments"
NODE = "made-up"


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealApi]:
    with real_api(tmp_path_factory.mktemp("kubernetes")) as made:
        with made.asking() as client:
            checked(client.post("/api/v1/nodes", json={"metadata": {"name": NODE}}))
        made.start_controllers("deployment", "replicaset")
        yield made


class Kubelet:
    """Runs what is bound to its node, and binds all there is to it: a scheduler, too."""

    def __init__(self, client: httpx2.AsyncClient) -> None:
        self.client = client
        self.due: dict[str, bool | None] = {}  # whether it should take requests; None: it is no member
        self._running: dict[str, asyncio.Task[None]] = {}

    async def work(self) -> None:
        while True:
            for content in checked(await self.client.get(PODS))["items"]:
                name = content["metadata"]["name"]
                if name not in self._running:
                    self._running[name] = asyncio.create_task(self._run(name))
            for task in self._running.values():
                if task.done():
                    task.result()
            await asyncio.sleep(0.02)

    async def _run(self, name: str) -> None:
        target = {"apiVersion": "v1", "kind": "Node", "name": NODE}
        checked(await self.client.post(f"{PODS}/{name}/binding", json={"metadata": {"name": name}, "target": target}))
        async with named(name).running() as replica:
            annotations = {"warmroute/http-port": str(replica.port)}
            changed = {"metadata": {"annotations": annotations}}
            checked(await self.client.patch(f"{PODS}/{name}", json=changed, headers=MERGE))
            await self._says(name, ready=False)
            await asyncio.sleep(STARTS_S)
            await self._says(name, ready=True)
            self.due[name] = True
            while "deletionTimestamp" not in (await self._read(name))["metadata"]:
                await asyncio.sleep(0.02)
            self.due[name] = False
            await asyncio.sleep(ENDS_S)
            await self._says(name, ready=False)
            await self._left_alone(replica)
        self.due[name] = None
        checked(await self.client.delete(f"{PODS}/{name}", params={"gracePeriodSeconds": "0"}))

    async def _left_alone(self, replica: Scripted) -> None:
        """It is stopped by force only when its connections are gone, or its time is."""
        until_s = time.monotonic() + SOON_S
        while replica.connections and time.monotonic() < until_s:
            await asyncio.sleep(0.01)

    async def _read(self, name: str) -> Any:
        return checked(await self.client.get(f"{PODS}/{name}"))

    async def _says(self, name: str, *, ready: bool) -> None:
        status = pod(name, "127.0.0.1", ready=ready)["status"]
        for each in status["containerStatuses"]:
            each |= {"image": "none", "imageID": "", "ready": ready}
        checked(await self.client.patch(f"{PODS}/{name}/status", json={"status": status}, headers=MERGE))

    async def end(self) -> None:
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)


def deployment() -> Object:
    labels = {"app": "llm"}
    container = {"name": "engine", "image": "none", "ports": [{"name": "other", "containerPort": 1}]}
    template = {
        "metadata": {"labels": labels, "annotations": {"warmroute/engine": "openai"}},
        "spec": {"containers": [container]},
    }
    strategy = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    spec = {"replicas": COUNT, "selector": {"matchLabels": labels}, "template": template, "strategy": strategy}
    return {"metadata": {"name": "llm"}, "spec": spec}


def service() -> Object:
    spec = {"selector": {"app": "llm"}, "ports": [{"name": "http", "port": 8000}], "clusterIP": "None"}
    return {"metadata": {"name": "llm", "labels": {"warmroute/engine": "openai"}}, "spec": spec}


class Observed:
    """The router as clients and an observer see it."""

    def __init__(self, running: Served, kubelet: Kubelet) -> None:
        self.running = running
        self.kubelet = kubelet
        self.answered: Counter[str] = Counter()
        self.unanswered: list[Any] = []
        self.late: list[str] = []
        self.worst_s = 0.0

    async def members(self) -> dict[str, bool]:
        async with connect(self.running.port) as client:
            answer = await client.get("/replicas")
        return {each["name"]: each["available"] for each in answer.json["replicas"]}

    async def ask(self) -> None:
        async with connect(self.running.port) as client:
            while True:
                answer = await client.post(CHAT, chat())
                if answer.status == 200:
                    self.answered[answer.json] += 1
                else:
                    self.unanswered.append((answer.status, answer.body))
                await asyncio.sleep(0.002)

    async def look(self) -> None:
        """Note differences that last a second; the router may know before the node does."""
        wrong_since_s: dict[tuple[str, bool | None], float] = {}
        while True:
            asked_s, members = time.monotonic(), await self.members()
            wrong = {each for each in self.kubelet.due.items() if members.get(each[0]) is not each[1]}
            wrong_since_s = {each: wrong_since_s.get(each, asked_s) for each in wrong}
            for (name, expected), since_s in wrong_since_s.items():
                self.worst_s = max(self.worst_s, asked_s - since_s)
                if self.worst_s > SOON_S:
                    self.late.append(f"{name} is {members.get(name)}, not {expected}, for {self.worst_s:.1f} s")
            await asyncio.sleep(0.02)

    def serving(self) -> set[str]:
        return {name for name, expected in self.kubelet.due.items() if expected}


@asynccontextmanager
async def rolled(api: RealApi) -> AsyncIterator[Observed]:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(api.administrator())
        kubelet = Kubelet(client)
        stack.push_async_callback(kubelet.end)
        told = Kubernetes(api.account(), pods="app=llm")
        running = await stack.enter_async_context(served(ready=False, kubernetes=told))
        observed = Observed(running, kubelet)
        checked(await client.post(f"/api/v1/namespaces/{SPACE}/services", json=service()))
        checked(await client.post(DEPLOYMENTS, json=deployment()))
        tasks = [asyncio.create_task(work) for work in (kubelet.work(), observed.look())]
        await until(lambda: len(observed.serving()) == COUNT, tasks)
        await until(lambda: len(running.router.members.by_name) == COUNT, tasks)
        await asyncio.sleep(0.1)
        tasks.append(asyncio.create_task(observed.ask()))
        try:
            yield observed
            for task in tasks:
                assert not task.done(), task
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_rolling_update_is_followed_and_every_request_is_answered(
    api: RealApi, capsys: pytest.CaptureFixture[str]
) -> None:
    async with rolled(api) as observed:
        before = observed.serving()
        changed = {"spec": {"template": {"metadata": {"annotations": {"rolled": "once"}}}}}
        checked(await observed.kubelet.client.patch(f"{DEPLOYMENTS}/llm", json=changed, headers=MERGE))
        await until(lambda: len(after := observed.serving()) == COUNT and not after & before)
        after = observed.serving()
        await until(lambda: after <= observed.answered.keys())
        await until(lambda: set(observed.running.router.members.by_name) == after)
        assert observed.unanswered == []
        assert observed.late == []
        assert before <= observed.answered.keys()
        with capsys.disabled():
            asked = observed.answered.total()
            print(f"\n{asked} requests answered; no replica was wrong for longer than {observed.worst_s:.2f} s")


async def until(condition: Any, tasks: list[asyncio.Task[None]] | None = None) -> None:
    async with asyncio.timeout(60.0):
        while not condition():
            for task in tasks or ():
                if task.done():
                    task.result()
            await asyncio.sleep(0.01)
