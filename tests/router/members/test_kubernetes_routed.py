"""A whole router that Kubernetes tells: pods come and go, and so does the API server, while clients are answered."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from events.messages import BlockStored
from events.publisher import Publisher, PublisherConfig
from events.sockets.curve import load_curve, write_keys
from router.config import Kubernetes
from router.members.discovery.collection import Cluster
from router.members.members import Members
from tests.router.kubernetes_api import PODS, POOLS, SPACE, KubernetesApi, Object, pod, pool, port
from tests.router.scripted import CHAT, Scripted, Served, chat, connect, named, served

pytestmark = pytest.mark.virtual

SOON_S = 1.0  # as promised


class Cloud:
    """Replicas, the API server that knows them, and a router with clients that never stop asking."""

    def __init__(self, api: KubernetesApi, running: Served, replicas: dict[str, Scripted]) -> None:
        self.api = api
        self.running = running
        self.replicas = replicas
        self.answered: Counter[str] = Counter()  # by replica
        self.unanswered: list[Any] = []

    def pod(self, name: str, **more: Any) -> Object:
        ports = [port("http", self.replicas[name].port)]
        return pod(name, "127.0.0.1", **({"ports": ports, "annotations": {"warmroute/engine": "openai"}} | more))

    def put(self, name: str, **more: Any) -> None:
        self.api.put(PODS, self.pod(name, **more))

    async def members(self) -> dict[str, bool]:
        """Replicas of GET /replicas by name, with their availability."""
        async with connect(self.running.port) as client:
            answer = await client.get("/replicas")
        assert answer.status == 200
        return {each["name"]: each["available"] for each in answer.json["replicas"]}

    async def soon(self, expected: dict[str, bool]) -> None:
        """Wait until the router's replicas are these; fails after SOON_S."""
        until_s = asyncio.get_running_loop().time() + SOON_S
        while (found := await self.members()) != expected:
            assert asyncio.get_running_loop().time() < until_s, f"{found} instead of {expected}"
            await asyncio.sleep(0.01)

    async def ask_on_and_on(self) -> None:
        async with connect(self.running.port) as client:
            while True:
                answer = await client.post(CHAT, chat())
                if answer.status == 200:
                    self.answered[answer.json] += 1
                else:
                    self.unanswered.append((answer.status, answer.body))
                await asyncio.sleep(0.001)  # the others share this process

    async def someone_answers(self, name: str) -> None:
        """Wait until the replica answers another request."""
        before = self.answered[name]
        async with asyncio.timeout(SOON_S):
            while self.answered[name] == before:
                await asyncio.sleep(0.005)

    async def asked_a_while(self, count: int = 20) -> Counter[str]:
        """The replicas that served the next requests."""
        before = self.answered.copy()
        async with asyncio.timeout(10):
            while (new := self.answered - before).total() < count:
                await asyncio.sleep(0.005)
        return new


@asynccontextmanager
async def cloud(
    *names: str, asking: bool = True, by_pool: bool = False, keys: Mapping[str, str] | None = None
) -> AsyncIterator[Cloud]:
    """A cloud with pods of these names; the first one is ready."""
    async with AsyncExitStack() as stack:
        replicas = {name: await stack.enter_async_context(named(name).running()) for name in names}
        api = await stack.enter_async_context(KubernetesApi().running())
        cluster = Cluster(api.url, SPACE)
        told = Kubernetes(cluster, pool="llm") if by_pool else Kubernetes(cluster, pods="app=llm")
        api.put(POOLS, pool("llm", ports=[replicas[names[0]].port]))
        running = await stack.enter_async_context(served(ready=False, kubernetes=told, **(keys or {})))
        made = Cloud(api, running, replicas)
        made.put(names[0])
        await made.soon({names[0]: True})
        asker = asyncio.create_task(made.ask_on_and_on() if asking else asyncio.sleep(0))
        try:
            yield made
            assert made.unanswered == []
            assert not asker.done() or not asking, asker
        finally:
            asker.cancel()
            await asyncio.gather(asker, return_exceptions=True)


async def test_a_pool_names_the_pods_and_their_port() -> None:
    async with cloud("a", "b", by_pool=True) as made:
        ports = {name: made.replicas[name].port for name in ("a", "b")}
        made.put("b", ports=[], labels={"app": "new"})
        await made.asked_a_while()
        assert await made.members() == {"a": True}
        made.api.put(POOLS, pool("llm", {"app": "new"}, [ports["b"]]))
        await made.soon({"b": True})
        await made.someone_answers("b")
        made.api.delete(POOLS, "llm")
        await made.asked_a_while()
        assert await made.members() == {"b": True}
        made.api.put(POOLS, pool("llm", ports=[ports["a"]]))
        await made.soon({"a": True})
        await made.someone_answers("a")


async def test_an_api_server_that_was_gone_is_heard_within_a_second() -> None:
    async with cloud("a", "b", "c") as made:
        made.put("b")
        await made.soon({"a": True, "b": True})
        await made.api.stop()
        await made.asked_a_while(100)
        made.api.delete(PODS, "b")
        made.put("c")
        made.api.forget()
        await asyncio.sleep(3.0)  # it tries as seldom as it ever does
        assert await made.members() == {"a": True, "b": True}  # the known replicas stay
        assert set(await made.asked_a_while()) == {"a", "b"}
        await made.api.start()
        await made.soon({"a": True, "c": True})
        made.put("b")
        await made.soon({"a": True, "b": True, "c": True})


@pytest.mark.virtual(False)
@pytest.mark.parametrize("known", [True, False])
async def test_events_of_pods_are_encrypted_with_the_keys_that_the_router_was_given(
    known: bool, tmp_path: Path
) -> None:
    server, secret = write_keys(str(tmp_path / "replica"))
    (tmp_path / "clients").mkdir()
    _, own = write_keys(str(tmp_path / ("clients/router" if known else "stranger")))
    curve = load_curve(str(secret), str(tmp_path / "clients"))
    any_port = "tcp://127.0.0.1:0"
    publishing = PublisherConfig(events=any_port, replay=any_port, status=any_port, snapshot=any_port, curve=curve)
    keys = {"curve_server": str(server), "curve_secret": str(own)}
    with Publisher(publishing) as publisher:
        publisher.publish([BlockStored([1], None, [1, 2, 3, 4], 4, None, "GPU", None)])
        ports = {
            f"warmroute/{name}-port": str(getattr(publisher.endpoints, name)).rpartition(":")[2]
            for name in ("events", "replay", "status", "snapshot")
        }
        async with cloud("a", asking=False, keys=keys) as made:
            made.put("a", annotations={"warmroute/engine": "openai"} | ports)
            assert await heard_of(made.running.router.members, "a") is known


async def heard_of(members: Members, name: str) -> bool:
    """Tell whether its events arrive, by a clock that others on the machine may hold up."""
    until_s = asyncio.get_running_loop().time() + 3 * SOON_S
    while (member := members.by_name.get(name)) is None or member.feed_state is None or member.feed_state.seq != 0:
        if asyncio.get_running_loop().time() > until_s:
            return False
        await asyncio.sleep(0.01)
    return True
