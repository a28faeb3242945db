"""An InferencePool: its pods at its port, however it changes, and what is wrong with it."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from router.members.discovery.collection import Cluster
from router.members.discovery.kubernetes import PoolDiscovery
from router.members.discovery.pool import InferencePool, Target, check_name, target_of
from router.members.spec import Desired
from tests.router.kubernetes_api import PODS, POOLS, SPACE, KubernetesApi, Object, following, pod, pool, port
from tests.router.loopback import Request, until

pytestmark = pytest.mark.virtual


A = {"app": "a"}


def of(content: Object) -> Target:
    return target_of(msgspec.convert(content, InferencePool))


# ---- what a pool says


def test_a_pool_is_a_selector_and_a_port() -> None:
    made = pool("llm", {"app": "llm", "example.com/tier": ""})
    assert of(made) == Target("llm", "app=llm,example.com/tier=", (8000,))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (pool("llm", ports=[]), "its targetPorts are []; write 1 to 8 different ones, from 1 to 65535"),
        (pool("llm", ports=[8000, 8000]), "its targetPorts are [8000, 8000]; write 1 to 8 different ones"),
        (pool("llm", ports=range(1, 99)), "its targetPorts are [1, 2, 3, 4, 5, 6, 7, 8, 9]; write 1 to 8"),
        (pool("llm", ports=[65536]), "its targetPorts are [65536]; write 1 to 8"),
        (pool("llm", {"app": "a,b"}), "its selector.matchLabels: 'app': 'a,b' is not a label; write a key and a value"),
        (pool("llm", {"app=a,b": ""}), "its selector.matchLabels: 'app=a,b': '' is not a label"),
        (
            pool("llm", {}),
            "its selector.matchLabels: without a label every pod",
        ),
        ({"metadata": {"name": "llm"}}, "its targetPorts are []"),
    ],
)
def test_a_pool_that_cannot_be_used_says_why(content: Object, why: str) -> None:
    assert of(content).unusable.startswith(why)


@pytest.mark.parametrize("name", ["llm", "a.b-c", "1"])
def test_a_name_may_be_that_of_an_object(name: str) -> None:
    check_name(name)


@pytest.mark.parametrize("name", ["", "LLM", "a,metadata.name!=b", "a/b", "-a", "a\n", "a" * 254])
def test_a_name_that_no_object_can_have_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is no name of an InferencePool; write its metadata"):
        check_name(name)


# ---- followed


class Followed:
    def __init__(self, api: KubernetesApi, watch: PoolDiscovery, said: list[Desired]) -> None:
        self.api = api
        self.watch = watch
        self.said = said

    async def names(self, *names: str) -> None:
        await until(lambda: self.said and sorted(self.said[-1]) == list(names), f"{names}")

    async def problem(self, why: str) -> None:
        await until(lambda: why in (self.watch.problem or ""), why)


@asynccontextmanager
async def followed(api: KubernetesApi) -> AsyncIterator[Followed]:
    watch = PoolDiscovery(Cluster(api.url, SPACE), "llm")
    async with api.running(), following(watch) as said:
        yield Followed(api, watch, said)


def api_with(*contents: Object) -> KubernetesApi:
    api = KubernetesApi()
    for content in contents:
        api.put(POOLS if "targetPorts" in content["spec"] else PODS, content)
    return api


async def test_its_pods_are_replicas_at_its_port_whatever_they_say_themselves() -> None:
    ports = [port("http", 9), port("events", 5557)]
    mistaken = pod("p", ports=ports, annotations={"warmroute/http-port": "10"})
    async with followed(api_with(pool("llm", ports=[8001]), mistaken, pod("q", labels=A))) as it:
        await it.names("p")
        (spec,) = it.said[-1].values()
        assert (spec.url, spec.events) == ("http://10.0.0.1:8001", "tcp://10.0.0.1:5557")
        assert it.watch.problem is None
    lists = [request for request in it.api.asked if "watch" not in request.query]
    assert [request.path for request in lists] == [POOLS, PODS]
    assert lists[0].query["fieldSelector"] == "metadata.name=llm"
    assert lists[1].query["labelSelector"] == "app=llm"


async def test_each_of_several_ports_is_a_replica_of_its_own() -> None:
    ports = [port("http", 8000), port("", 8001), port("events", 5557), port("replay", 5600)]
    async with followed(api_with(pool("llm", ports=[8000, 8001]), pod("p", ports=ports))) as it:
        await it.names("p-8000", "p-8001")
        found = {spec.name: (spec.url, spec.events, spec.replay) for spec in it.said[-1].values()}
        assert found == {
            "p-8000": ("http://10.0.0.1:8000", "tcp://10.0.0.1:5557", "tcp://10.0.0.1:5600"),
            "p-8001": ("http://10.0.0.1:8001", "tcp://10.0.0.1:5558", "tcp://10.0.0.1:5601"),
        }
        it.api.put(
            PODS, pod("p", ports=[*ports, port("replay", 65535)], annotations={"warmroute/replay-port": "65535"})
        )
        await until(lambda: "p-8000" in it.said[-1] and it.said[-1]["p-8000"].replay == "tcp://10.0.0.1:65535", "it")
        it.api.put(POOLS, pool("llm", ports=[8001]))
        await it.names("p")


async def test_a_pool_may_come_late_go_and_come_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "router.members.discovery")
    async with followed(api_with(pool("another"), pod("p"))) as it:
        await it.problem("it does not exist; create it")
        assert it.said == []
        it.api.put(POOLS, pool("llm"))
        await it.names("p")
        assert it.watch.problem is None
        it.api.delete(POOLS, "llm")
        await it.problem("it does not exist")
        it.api.put(PODS, pod("q"))  # those of the last pool stay, and are followed
        await it.names("p", "q")
        it.api.put(POOLS, pool("llm", ports=[0]))
        await it.problem("its targetPorts are [0]; write 1 to 8")
        it.api.put(POOLS, pool("llm"))
        await until(lambda: it.watch.problem is None, "the pool")
    where = "the InferencePool space/llm"
    kept = "keeping what it named before"
    assert [message for message in caplog.messages if where in message] == [
        f"{where} cannot be used: it does not exist; create it; {kept}",
        f"{where} can be read again",
        f"{where} cannot be used: it does not exist; create it; {kept}",
        f"{where} cannot be used: its targetPorts are [0]; write 1 to 8 different ones, from 1 to 65535; {kept}",
        f"{where} can be read again",
    ]
    assert [list(desired) for desired in it.said] == [["p"], ["p", "q"]]


@pytest.mark.parametrize(
    ("path", "status", "why"),
    [
        (
            POOLS,
            404,
            "status 404: the cluster has no inferencepools of inference.networking.k8s.io/v1; install their definition",
        ),
        (
            POOLS,
            403,
            "status 403; let the service account get, list and watch inferencepools of inference.networking.k8s.io in "
            "the namespace space",
        ),
        (PODS, 403, "status 403; let the service account get, list and watch pods of the core API in the namespace"),
    ],
)
async def test_a_refusal_is_the_problem_until_it_ends(path: str, status: int, why: str) -> None:
    def refuses(request: Request) -> tuple[int, dict[str, str]] | None:
        return (status, {}) if request.path == path else None

    api = api_with(pool("llm"), pod("p"))
    api.refusals.append(refuses)
    async with followed(api) as it:
        await it.problem(why)
        assert it.said == []
        api.refusals.clear()
        await it.names("p")
        await until(lambda: it.watch.problem is None, "no problem")
