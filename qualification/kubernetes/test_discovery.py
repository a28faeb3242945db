"""The same with an API server of Kubernetes itself, where there is one (`$KUBEBUILDER_ASSETS`): RBAC, TLS, and all."""

import asyncio
import logging
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx2
import msgspec
import pytest

from qualification.kubernetes.real import (
    MERGE,
    ROUTER,
    RealApi,
    Relay,
    checked,
    definition,
    needing_a_cluster,
    real_api,
    until,
)
from router.config import Kubernetes
from router.members.discovery.kubernetes import KubernetesWatch, PoolDiscovery
from router.members.discovery.pods import pods_of
from tests.router.kubernetes_api import PODS, POOLS, SPACE, following, pod, pool, port
from tests.router.members.test_kubernetes_pods import NO_SELECTORS, SELECTORS
from tests.router.scripted import CHAT, Scripted, Served, chat, connect, named, served

pytestmark = needing_a_cluster()

SOON_S = 3.0  # a second is what is promised, and what is measured; a busy machine may add to that
ROUNDS = 10


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealApi]:
    with real_api(tmp_path_factory.mktemp("kubernetes")) as made:
        yield made


class Kubelet:
    """Makes pods, and reports their state like a node."""

    def __init__(self, client: httpx2.AsyncClient, replicas: dict[str, Scripted]) -> None:
        self.client = client
        self.replicas = replicas

    async def create(self, name: str) -> None:
        content = pod(name, annotations={"warmroute/engine": "openai"})
        content["metadata"].pop("uid")
        container = {"image": "none", "ports": [port("http", self.replicas[name].port)]}
        content["spec"]["containers"][0] |= container
        content["spec"]["nodeName"] = "made-up"
        content.pop("status")
        checked(await self.client.post(PODS, json=content))

    async def says(self, name: str, **state: Any) -> None:
        status = pod(name, "127.0.0.1", **state)["status"]
        for each in status["containerStatuses"]:
            each |= {"image": "none", "imageID": "", "ready": True}
        checked(await self.client.patch(f"{PODS}/{name}/status", json={"status": status}, headers=MERGE))

    async def delete(self, name: str, grace_s: int | None = None) -> None:
        """First it only ends; with no grace it is gone."""
        params = {} if grace_s is None else {"gracePeriodSeconds": str(grace_s)}
        checked(await self.client.delete(f"{PODS}/{name}", params=params))


class Cloud:
    def __init__(self, kubelet: Kubelet, running: Served, relay: Relay) -> None:
        self.kubelet = kubelet
        self.relay = relay
        self.running = running
        self.unanswered: list[Any] = []
        self.answered = 0
        self.latencies_s: list[float] = []

    async def members(self) -> dict[str, bool]:
        async with connect(self.running.port) as client:
            answer = await client.get("/replicas")
        return {each["name"]: each["available"] for each in answer.json["replicas"]}

    async def soon(self, expected: dict[str, bool], since_s: float | None = None) -> None:
        since_s = time.monotonic() if since_s is None else since_s
        while (found := await self.members()) != expected:
            assert time.monotonic() < since_s + SOON_S, f"{found} instead of {expected}"
            await asyncio.sleep(0.002)
        self.latencies_s.append(time.monotonic() - since_s)

    async def asked(self, count: int) -> None:
        before = self.answered
        await until(lambda: self.answered > before + count)

    async def ask_on_and_on(self) -> None:
        async with connect(self.running.port) as client:
            while True:
                answer = await client.post(CHAT, chat())
                self.answered += answer.status == 200
                if answer.status != 200:
                    self.unanswered.append((answer.status, answer.body))
                await asyncio.sleep(0.002)


@asynccontextmanager
async def cloud(api: RealApi, *names: str) -> AsyncIterator[Cloud]:
    """A router with its account's permissions, and pods; the first one is ready."""
    async with AsyncExitStack() as stack:
        replicas = {name: await stack.enter_async_context(named(name).running()) for name in names}
        kubelet = Kubelet(await stack.enter_async_context(api.administrator()), replicas)
        relay = Relay(api.port)
        stack.callback(relay.close)
        await relay.open()
        watched = msgspec.structs.replace(api.account(), url=f"https://127.0.0.1:{relay.port}")
        told = Kubernetes(watched, pods="app=llm")
        running = await stack.enter_async_context(served(ready=False, kubernetes=told))
        made = Cloud(kubelet, running, relay)
        await kubelet.create(names[0])
        await kubelet.says(names[0])
        await made.soon({names[0]: True})
        asker = asyncio.create_task(made.ask_on_and_on())
        try:
            yield made
            assert made.unanswered == []
            assert made.answered and not asker.done()
        finally:
            asker.cancel()
            await asyncio.gather(asker, return_exceptions=True)
            for name in names:
                await kubelet.client.delete(f"{PODS}/{name}", params={"gracePeriodSeconds": "0"})


async def test_pods_are_replicas_within_a_second_of_every_change(
    api: RealApi, capsys: pytest.CaptureFixture[str]
) -> None:
    async with cloud(api, "a", "b") as made:
        kubelet = made.kubelet
        for _ in range(ROUNDS):
            await kubelet.create("b")
            await kubelet.says("b", ready=False)
            assert await made.members() == {"a": True}
            await kubelet.says("b")
            await made.soon({"a": True, "b": True})
            first, since_s = made.running.member("b"), time.monotonic()
            await kubelet.says("b", restarts=1)
            while made.running.router.members.by_name.get("b") in (first, None):
                assert time.monotonic() < since_s + SOON_S
                await asyncio.sleep(0.002)
            await made.soon({"a": True, "b": True}, since_s)
            await kubelet.delete("b")
            await made.soon({"a": True, "b": False})
            await kubelet.says("b", restarts=1, ready=False)
            assert await made.members() == {"a": True, "b": False}
            await kubelet.delete("b", grace_s=0)
            await made.soon({"a": True})
        report(capsys, f"API server {api.version()}: a change is known after", made.latencies_s)


async def test_a_killed_api_server_changes_nothing_and_is_heard_when_it_is_back(
    api: RealApi, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, "router.members.discovery")
    async with cloud(api, "a", "b") as made:
        await made.kubelet.create("b")
        await made.kubelet.says("b")
        await made.soon({"a": True, "b": True})
        made.latencies_s.clear()
        for _ in range(2):
            before = made.answered
            await asyncio.to_thread(api.kill)
            restarting = asyncio.create_task(asyncio.to_thread(api.start))
            while not restarting.done():
                assert await made.members() == {"a": True, "b": True}
                await asyncio.sleep(0.01)
            await restarting
            assert made.answered > before
            since_s = time.monotonic()
            await made.kubelet.says("b", ready=False)
            await made.soon({"a": True}, since_s)
            await made.kubelet.says("b")
            await made.soon({"a": True, "b": True})
        report(capsys, "after a restart of the API server a change is known after", made.latencies_s)
    assert "keeping what it named" in caplog.text
    assert "pods space/app=llm can be read again" in caplog.text


async def test_changes_during_an_outage_are_known_within_a_second(
    api: RealApi, capsys: pytest.CaptureFixture[str]
) -> None:
    async with cloud(api, "a", "b", "c") as made:
        kubelet = made.kubelet
        await kubelet.create("b")
        await kubelet.says("b")
        await made.soon({"a": True, "b": True})
        made.latencies_s.clear()
        for _ in range(ROUNDS):
            made.relay.close()
            await kubelet.create("c")
            await kubelet.says("c")
            await kubelet.delete("b", grace_s=0)
            await made.asked(300)
            assert await made.members() == {"a": True, "b": True}
            await made.relay.open()
            await made.soon({"a": True, "c": True})
            await kubelet.create("b")
            await kubelet.says("b")
            await kubelet.delete("c", grace_s=0)
            await made.soon({"a": True, "b": True})
        report(capsys, "what happened while it could not be reached is known after", made.latencies_s[::2])


def test_selectors_are_refused_as_the_server_refuses_them(api: RealApi) -> None:
    with api.asking() as client:
        for selector in (*SELECTORS, *NO_SELECTORS):
            status = client.get(PODS, params={"labelSelector": selector}).status_code
            assert status == (200 if selector in SELECTORS else 400), selector


def test_the_documented_role_is_enough_and_no_more(api: RealApi) -> None:
    with api.asking(ROUTER) as client:
        assert client.get(PODS).status_code == 200
        assert client.get(POOLS).status_code in (200, 404)  # allowed; it may not be defined
        for resource in ("secrets", "configmaps", "serviceaccounts"):
            assert client.get(f"/api/v1/namespaces/{SPACE}/{resource}").status_code == 403
        assert client.get("/api/v1/namespaces/default/pods").status_code == 403
        assert client.post(PODS, json=pod("mine")).status_code == 403
        assert client.delete(PODS).status_code == 403


async def test_without_the_role_the_reason_names_it(api: RealApi) -> None:
    elsewhere = msgspec.structs.replace(api.account(), namespace="default")
    watch = KubernetesWatch(elsewhere, pods_of("default", "app=llm"))
    async with following(watch):
        await until(lambda: watch.problem is not None)
    assert watch.problem == (
        "status 403; let the service account get, list and watch pods of the core API in the namespace default"
    )


async def test_a_list_of_several_pages_is_whole(api: RealApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.members.discovery.kubernetes.PAGE", 2)
    names = [f"paged-{number}" for number in range(5)]
    with api.asking() as client:
        for name in names:
            kubelet_makes(client, name, "paged")
        async with following(KubernetesWatch(api.account(), pods_of(SPACE, "app=paged"))) as said:
            await until(lambda: said)
            assert sorted(said[0]) == names
        for name in names:
            checked(client.delete(f"{PODS}/{name}", params={"gracePeriodSeconds": "0"}))


async def test_a_pool_is_followed_from_before_its_kind_is_defined(api: RealApi) -> None:
    watch = PoolDiscovery(api.account(), "llm")
    definitions, group = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", "inference.networking.k8s.io"
    content = pool("llm", {"app": "pooled"}, [8001]) | {"apiVersion": f"{group}/v1", "kind": "InferencePool"}
    content["metadata"].pop("uid")
    with api.asking() as client:
        async with following(watch) as said:
            await until(lambda: watch.problem is not None)
            assert "the cluster has no inferencepools of inference.networking.k8s.io/v1" in str(watch.problem)
            checked(client.post(definitions, json=definition("inferencepools", "InferencePool", group)))
            await until(lambda: watch.problem == "it does not exist; create it")
            checked(client.post(POOLS, json=content))
            await until(lambda: said == [{}])
            kubelet_makes(client, "pooled-p", "pooled")
            await until(lambda: [spec.url for spec in said[-1].values()] == ["http://10.0.0.1:8001"])
            changed = {"spec": {"selector": {"matchLabels": {"app": "others"}}}}
            checked(client.patch(f"{POOLS}/llm", json=changed, headers=MERGE))
            await until(lambda: not said[-1])
            kubelet_makes(client, "pooled-q", "others")
            await until(lambda: list(said[-1]) == ["pooled-q"])
            checked(client.delete(f"{POOLS}/llm"))
            await until(lambda: watch.problem == "it does not exist; create it")
            assert list(said[-1]) == ["pooled-q"]
        for name in ("pooled-p", "pooled-q"):
            checked(client.delete(f"{PODS}/{name}", params={"gracePeriodSeconds": "0"}))


def kubelet_makes(client: httpx2.Client, name: str, app: str) -> None:
    """A pod that is ready."""
    container = {"name": "c", "image": "none", "ports": [port("http", 8000)]}
    metadata = {"name": name, "labels": {"app": app}}
    checked(client.post(PODS, json={"metadata": metadata, "spec": {"containers": [container]}}))
    status = {"status": pod(name)["status"] | {"containerStatuses": []}}
    checked(client.patch(f"{PODS}/{name}/status", json=status, headers=MERGE))


def report(capsys: pytest.CaptureFixture[str], what: str, latencies_s: list[float]) -> None:
    with capsys.disabled():
        middle_ms, most_ms = 1000 * statistics.median(latencies_s), 1000 * max(latencies_s)
        print(f"\n{what} {middle_ms:.0f} ms (median of {len(latencies_s)}), {most_ms:.0f} ms at most")
