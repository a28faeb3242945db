"""Pods of the smallest overlay end under load, with the timings of their manifests: no request may notice."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.k8s.load import SIMULATED, under_load
from tests.k8s.pods_here import Balancer, PodHere
from tests.k8s.rendered import Pod, pods, rendered
from tests.router.kubernetes_api import PODS, SPACE, KubernetesApi, port
from tests.router.kubernetes_api import pod as api_pod

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]

OVERLAY = "kind"
HEARD_S = 3.0  # until the last proxy has heard that a pod ends; and routers of replicas


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
        """One that is not ready here ends, and serves still."""
        ports = [port(name, number) for name, number in self._replica.ports.items()]
        labels = dict(self._replica.labels)
        self.api.put(PODS, api_pod(pod.name, pod.address, ending=not ready, labels=labels, ports=ports))

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
        async with under_load(it.service.url) as load:
            took = [await replaced(it, old) for old in first]
    print(f"\nboth routers replaced: {len(load.failed)} of {load.requests} failed, each ended after {took} s")
    assert load.failed == [] and load.requests > 100
    assert all(took_s < first[0].grace_s for took_s in took)


@pytest.mark.grid
async def test_without_the_delay_requests_would_fail(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        await it.router()
        old = await it.router("--drain-delay=0")
        async with under_load(it.service.url) as load:
            await replaced(it, old)
    print(f"\nwithout --drain-delay: {len(load.failed)} of {load.requests} failed")
    assert load.failed != []


async def test_a_replica_that_ends_fails_no_request(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        await it.router()
        old = it._made[0]
        async with under_load(it.service.url) as load:
            await it.replica()
            ending = asyncio.create_task(old.end())
            await asyncio.sleep(HEARD_S)
            it.tell(old, ready=False)
            took_s = await ending
            it.api.delete(PODS, old.name)
    print(f"\na replica ended: {len(load.failed)} of {load.requests} failed, it ended after {took_s:.1f} s")
    assert load.failed == [] and load.requests > 50
