"""Pods of the smallest overlay end under load, with the timings of their manifests: no request may notice."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.k8s.pods_here import Balancer, PodHere
from tests.k8s.rendered import Pod, pods, rendered
from tests.router.kubernetes_api import SLICES, SPACE, KubernetesApi
from tests.router.loopback import until

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]

OVERLAY = "kind"
CLIENTS = 12
HEARD_S = 3.0  # until the last proxy has heard that a pod ends; and routers of replicas
SIMULATED = (
    *("--engine=simulated", "--simulated-decode-tokens-per-s=60", "--simulated-batch-slowdown=0"),
    *("--simulated-prefill-tokens-per-s=100000", "--log-level=warning"),
)


class Load:
    """Clients with connections that they keep, through the Service; half of them stream."""

    def __init__(self, port: int) -> None:
        self.requests = 0
        self.failed: list[str] = []
        self._ending = False
        self._url = f"http://127.0.0.1:{port}"

    async def run(self, number: int) -> None:
        async with httpx2.AsyncClient(base_url=self._url, timeout=30, trust_env=False) as http:
            while not self._ending:
                tokens = 90 if number % 2 else 15
                body = {"model": "demo", "prompt": f"Once upon a time, {number}", "max_tokens": tokens}
                try:
                    await self._ask(http, body | {"ignore_eos": True, "stream": bool(number % 2)})
                except (httpx2.HTTPError, AssertionError) as error:
                    self.failed.append(f"{type(error).__name__}: {error}")
                self.requests += 1

    @staticmethod
    async def _ask(http: httpx2.AsyncClient, body: dict[str, Any]) -> None:
        answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        if body["stream"]:
            assert answer.text.endswith("data: [DONE]\n\n"), answer.text[-200:]
            assert answer.text.count("data: {") >= body["max_tokens"], "tokens are missing"

    def end(self) -> None:
        self._ending = True


class World:
    """The API server, the Service, and pods that come and go."""

    def __init__(self, api: KubernetesApi, models: Path) -> None:
        self.api = api
        self.service = Balancer()
        self._models = models
        self._addresses: Iterator[int] = itertools.count(11)
        self._made: list[PodHere] = []
        found = pods(rendered(OVERLAY))
        [self._router] = [pod for pod in found if pod.is_a(component="router")]
        [self._replica] = [pod for pod in found if pod.is_a(component="replica")]

    async def router(self, *more: str) -> PodHere:
        own = (f"--kubernetes-api={self.api.url}", f"--kubernetes-namespace={SPACE}", "--log-level=warning")
        pod = await self._begin(self._router, "router", (*own, *more))
        self.service.pods.append(pod)
        return pod

    async def replica(self) -> PodHere:
        pod = await self._begin(self._replica, "replica", SIMULATED)
        self.tell(pod, ready=True)
        return pod

    async def _begin(self, template: Pod, kind: str, more: tuple[str, ...]) -> PodHere:
        number = next(self._addresses)
        pod = PodHere(template, f"{kind}-{number}", f"127.0.0.{number}", self._models, more)
        self._made.append(pod)
        await pod.start()
        return pod

    def tell(self, pod: PodHere, *, ready: bool) -> None:
        """Its endpoint; one that is not ready here ends, and serves still."""
        target = {"kind": "Pod", "name": pod.name, "uid": f"uid-{pod.name}"}
        conditions = {"ready": ready, "serving": True, "terminating": not ready}
        content = {
            "metadata": {"name": pod.name, "labels": {"kubernetes.io/service-name": "warmroute-replicas"}},
            "addressType": "IPv4",
            "endpoints": [{"addresses": [pod.address], "conditions": conditions, "targetRef": target}],
            "ports": [{"name": name, "port": port, "protocol": "TCP"} for name, port in self._replica.ports.items()],
        }
        self.api.put(SLICES, content)

    async def kill_all(self) -> None:
        for pod in self._made:
            await pod.kill()


@asynccontextmanager
async def world(folder: Path) -> AsyncIterator[World]:
    api = KubernetesApi()
    it = World(api, folder)
    async with api.running(), await it.service.start():
        try:
            await asyncio.gather(*(it.replica() for _ in range(3)))
            yield it
        finally:
            await it.kill_all()


async def more_of(load: Load) -> None:
    enough = load.requests + 2 * CLIENTS
    await until(lambda: load.requests >= enough, "more requests have been answered")


@asynccontextmanager
async def under_load(it: World) -> AsyncIterator[Load]:
    load = Load(it.service.port)
    tasks = [asyncio.create_task(load.run(number)) for number in range(CLIENTS)]
    try:
        await more_of(load)  # everybody has a connection, and streams run
        yield load
        await more_of(load)
    finally:
        load.end()
        await asyncio.gather(*tasks)


async def replaced(it: World, old: PodHere, *more: str) -> float:
    """As a rolling update does it; the seconds that the old router took to end."""
    await it.router(*more)
    ending = asyncio.create_task(old.end())
    await asyncio.sleep(HEARD_S)
    it.service.pods.remove(old)
    return await ending


async def test_a_rolling_update_of_routers_fails_no_request(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        first = [await it.router(), await it.router()]
        async with under_load(it) as load:
            took = [await replaced(it, old) for old in first]
    print(f"\nboth routers replaced: {len(load.failed)} of {load.requests} failed, each ended after {took} s")
    assert load.failed == [] and load.requests > 100
    assert all(took_s < first[0].grace_s for took_s in took)


async def test_without_the_delay_requests_would_fail(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        await it.router()
        old = await it.router("--drain-delay=0")
        async with under_load(it) as load:
            await replaced(it, old)
    print(f"\nwithout --drain-delay: {len(load.failed)} of {load.requests} failed")
    assert load.failed != []


async def test_a_replica_that_ends_fails_no_request(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        await it.router()
        old = it._made[0]
        async with under_load(it) as load:
            await it.replica()
            ending = asyncio.create_task(old.end())
            await asyncio.sleep(HEARD_S)
            it.tell(old, ready=False)
            took_s = await ending
            it.api.delete(SLICES, old.name)
    print(f"\na replica ended: {len(load.failed)} of {load.requests} failed, it ended after {took_s:.1f} s")
    assert load.failed == [] and load.requests > 50
