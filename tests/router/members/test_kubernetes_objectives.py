"""InferenceObjectives: those of the pool, and a gateway's requests that name them."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import pytest

from router.config import EXTENSION, Kubernetes
from router.members.discovery.collection import Cluster
from router.members.discovery.pool import objectives_of
from router.tenants.keys import CLASSES, Key, digest_of
from tests.router.http.picker.asking import Gateway, asked, gateway
from tests.router.kubernetes_api import (
    OBJECTIVES,
    PODS,
    POOLS,
    SPACE,
    KubernetesApi,
    Object,
    Refusal,
    objective,
    pod,
    pool,
    port,
)
from tests.router.loopback import Request, until
from tests.router.scripted import CHAT, Served, chat, connect, named, served


def priorities(*objects: Object) -> dict[str, int]:
    made = objectives_of(SPACE, "llm", EXTENSION)
    made.listed([made.page(msgspec.json.encode({"metadata": {"resourceVersion": "5"}, "items": objects}))])
    return {name: one.priority for name, one in made.desired().items()}


def test_objectives_are_those_of_the_pool() -> None:
    elsewhere = objective("elsewhere", 3)
    elsewhere["spec"]["poolRef"]["group"] = "inference.networking.x-k8s.io"
    short: Object = {"metadata": {"name": "short"}, "spec": {"poolRef": {"name": "llm"}}}
    found = priorities(objective("a", -(2**31)), objective("b", None), objective("c", 1, of="other"), elsewhere, short)
    assert found == {"a": -(2**31), "b": 0, "short": 0}
    assert priorities({"metadata": {"name": "none"}}) == {}


class Cloud:
    def __init__(self, api: KubernetesApi, running: Served, asking: Gateway) -> None:
        self.api = api
        self.running = running
        self.asking = asking

    async def knows(self, priorities: dict[str, int]) -> None:
        await until(lambda: self.running.router.priorities and self.running.router.priorities.of == priorities, "them")

    async def class_of(self, **headers: str) -> str | None:
        """The class of a gateway's request."""
        stream = self.asking.stream()
        await stream.begin(asked(), **headers)
        await stream.picked()
        await stream.answer()
        await stream.end()
        name: str | None = self.running.router.history.decisions[-1].record().service_class
        return name


@asynccontextmanager
async def cloud(
    *objectives: Object, on: bool = True, defined: bool = True, keys: tuple[Key, ...] = ()
) -> AsyncIterator[Cloud]:
    """A router that finds one replica by a pool."""
    async with AsyncExitStack() as stack:
        replica = await stack.enter_async_context(named("a").running())
        api = await stack.enter_async_context(KubernetesApi().running())
        api.put(POOLS, pool("llm", ports=[replica.port]))
        own: Object = {"ports": [port("http", replica.port)], "annotations": {"warmroute/engine": "openai"}}
        api.put(PODS, pod("a", "127.0.0.1", **own))
        for each in objectives:
            api.put(OBJECTIVES, each)
        api.refusals += [] if defined else [undefined]
        told = Kubernetes(Cluster(api.url, SPACE), pool="llm", objectives=on)
        front: Object = {"picker_listen": "127.0.0.1:0", "keys": keys, "demand_key": bool(keys)}
        running = await stack.enter_async_context(served(ready=False, kubernetes=told, **front))
        members = running.router.members.by_name
        await until(lambda: "a" in members and members["a"].candidate.unavailable is None, "the replica")
        yield Cloud(api, running, await stack.enter_async_context(gateway(running)))


async def test_a_request_has_the_class_of_its_objective() -> None:
    async with cloud(objective("urgent", 7), objective("whenever", -7)) as made:
        await made.knows({"urgent": 7, "whenever": -7})
        assert await made.class_of() == "standard"
        assert await made.class_of(x_gateway_inference_objective="urgent") == "interactive"
        assert await made.class_of(x_llm_d_inference_objective="whenever") == "batch"
        made.api.put(OBJECTIVES, objective("urgent", None))
        made.api.delete(OBJECTIVES, "whenever")
        await made.knows({"urgent": 0})
        assert await made.class_of(x_llm_d_inference_objective="whenever") == "standard"
        async with connect(made.running.port) as client:  # its own front reads them, too
            made.api.put(OBJECTIVES, objective("whenever", -1))
            await made.knows({"urgent": 0, "whenever": -1})
            await client.post(CHAT, chat(), x_llm_d_inference_objective="whenever")
            assert made.running.router.history.decisions[-1].record().service_class == "batch"


async def test_a_key_is_lowered_but_not_raised() -> None:
    key = Key(name="k", digest=digest_of("secret"), classes=CLASSES[1:])
    async with cloud(objective("urgent", 7), objective("whenever", -7), keys=(key,)) as made:
        await made.knows({"urgent": 7, "whenever": -7})
        for name, wanted in (("urgent", "standard"), ("whenever", "batch")):
            found = await made.class_of(authorization="Bearer secret", x_llm_d_inference_objective=name)
            assert found == wanted


async def test_unless_asked_for_no_objective_is_read() -> None:
    async with cloud(objective("urgent", 7), on=False) as made:
        assert await made.class_of(x_gateway_inference_objective="urgent") is None
        assert OBJECTIVES not in {request.path for request in made.api.asked}


async def test_without_their_kind_requests_are_standard_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with cloud(defined=False) as made:
        why = (
            "Cannot read objectives of pool space/llm: status 404: the cluster has no inferenceobjectives of "
            "inference.networking.x-k8s.io/v1alpha2; install their definition"
        )
        await until(lambda: why in caplog.text, why)
        assert await made.class_of(x_gateway_inference_objective="urgent") == "standard"


def undefined(request: Request) -> Refusal | None:
    return (404, {}) if request.path == OBJECTIVES else None
