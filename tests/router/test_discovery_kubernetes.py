"""Kubernetes' EndpointSlices: what they mean, and a watch on a server that drops, forgets and refuses."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from router.discovery.backoff import Backoff
from router.discovery.cluster import Cluster, in_cluster
from router.discovery.kubernetes import EndpointSlices
from router.discovery.slices import Conditions, Expired, Slices, is_draining
from router.discovery.wanted import Wanted
from tests.router.loopback import Reply, Request, serving, until

HTTP_PORT = {"name": "http", "port": 8000, "protocol": "TCP"}
EVENTS = [{"name": "events", "port": 5557}, {"name": "replay", "port": 5558, "protocol": "TCP"}]


def slice_of(name: str, *endpoints: dict[str, Any], ports: Any = None, family: str = "IPv4") -> dict[str, Any]:
    return {
        "metadata": {"name": name, "resourceVersion": "0", "labels": {"kubernetes.io/service-name": "llm"}},
        "addressType": family,
        "endpoints": list(endpoints),
        "ports": [HTTP_PORT] if ports is None else ports,
    }


def pod(name: str, address: str = "10.0.0.1", **conditions: bool) -> dict[str, Any]:
    target = {"kind": "Pod", "name": name, "uid": f"uid-{name}", "namespace": "default"}
    return {"addresses": [address], "conditions": {"ready": True} | conditions, "targetRef": target}


def listed(*slices: dict[str, Any]) -> Slices:
    made = Slices()
    made.listed(
        msgspec.json.encode({"kind": "EndpointSliceList", "metadata": {"resourceVersion": "5"}, "items": slices})
    )
    return made


# ---- what slices mean


def test_a_ready_pod_is_a_replica_by_its_name_and_ports() -> None:
    slices = listed(slice_of("s", pod("p"), ports=[HTTP_PORT, *EVENTS]))
    spec = slices.wanted()["p"]
    assert (spec.url, spec.events, spec.replay, spec.snapshot) == (
        "http://10.0.0.1:8000",
        "tcp://10.0.0.1:5557",
        "tcp://10.0.0.1:5558",
        None,
    )
    assert (spec.incarnation, spec.draining) == ("uid-p", False)
    assert slices.resource_version == "5"


def test_an_endpoint_that_is_no_pod_is_named_by_its_address() -> None:
    bare = {"addresses": ["2001:db8::1"]}
    assert list(listed(slice_of("s", bare, family="IPv6")).wanted()) == ["[2001:db8::1]:8000"]


def test_the_only_port_is_that_of_http() -> None:
    for ports in ([{"port": 8000}], [{"name": "web", "port": 8000}], [{"name": "", "port": 8000}]):
        assert listed(slice_of("s", pod("p"), ports=ports)).wanted()["p"].url == "http://10.0.0.1:8000"


def test_without_a_port_of_http_there_is_no_replica_and_the_log_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    slices = listed(slice_of("s", pod("p"), ports=[{"name": "web", "port": 1}, *EVENTS]))
    assert slices.wanted() == slices.wanted() == {}
    assert [record.getMessage() for record in caplog.records] == [
        "An endpoint of the service cannot be used: 10.0.0.1 has no port named http; "
        "name its ports http, events, replay, ..."
    ]


def test_a_pod_of_two_families_counts_once() -> None:
    six = slice_of("a", pod("p", "2001:db8::1"), family="IPv6")
    wanted = listed(six, slice_of("b", pod("p"))).wanted()
    assert [spec.url for spec in wanted.values()] == ["http://10.0.0.1:8000"]


@pytest.mark.parametrize(
    ("conditions", "draining"),
    [
        ({}, False),
        ({"ready": True}, False),
        ({"ready": False}, None),
        ({"ready": False, "serving": True, "terminating": True}, True),
        ({"ready": False, "serving": False, "terminating": True}, None),
        ({"ready": False, "serving": True, "terminating": False}, None),
        ({"ready": True, "serving": True, "terminating": False}, False),
    ],
)
def test_conditions_say_whether_it_takes_requests(conditions: dict[str, bool], draining: bool | None) -> None:
    assert is_draining(Conditions(**conditions)) is draining
    found = listed(slice_of("s", pod("p") | {"conditions": conditions})).wanted()
    assert [spec.draining for spec in found.values()] == ([] if draining is None else [draining])


def test_lists_that_are_null_are_empty() -> None:
    empty = slice_of("s") | {"endpoints": None, "ports": None}
    assert listed(empty).wanted() == {}


def test_events_of_a_watch_change_the_slices() -> None:
    slices = listed()

    def event(kind: str, content: dict[str, Any], version: str) -> bool:
        content["metadata"]["resourceVersion"] = version
        return slices.changed(msgspec.json.encode({"type": kind, "object": content}))

    assert event("ADDED", slice_of("s", pod("p")), "6")
    assert list(slices.wanted()) == ["p"]
    assert event("MODIFIED", slice_of("s", pod("q")), "7")
    assert list(slices.wanted()) == ["q"]
    assert not event("BOOKMARK", {"metadata": {}}, "9")
    assert slices.resource_version == "9"
    assert event("DELETED", slice_of("s", pod("q")), "10")
    assert slices.wanted() == {}
    with pytest.raises(Expired, match="too old"):
        slices.changed(b'{"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}}')
    with pytest.raises(ValueError, match="the watch failed with 500: etcd"):
        slices.changed(b'{"type": "ERROR", "object": {"kind": "Status", "code": 500, "message": "etcd"}}')


# ---- in a cluster


def test_a_pod_knows_its_cluster_by_environment_and_account(tmp_path: Path) -> None:
    for name in ("token", "ca.crt", "namespace"):
        (tmp_path / name).write_text(f"{name}\n")
    environment = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    cluster = in_cluster(environment, folder=tmp_path)
    assert cluster == Cluster("https://[fd00::1]:6443", "namespace", str(tmp_path / "token"), str(tmp_path / "ca.crt"))
    assert in_cluster(environment, "mine", tmp_path).namespace == "mine"
    for env, folder in (({}, tmp_path), (environment, tmp_path / "none")):
        with pytest.raises(ValueError, match=r"does not run in a pod with a service account.*kubectl proxy"):
            in_cluster(env, folder=folder)


# ---- the watch


class FakeApi:
    """Lists and watches as an API server does, and misbehaves as told."""

    def __init__(self) -> None:
        self.version = 1
        self.slices: dict[str, dict[str, Any]] = {}
        self.history: list[tuple[int, dict[str, Any]]] = []
        self.forgotten = 0  # changes up to this version are gone
        self.status: dict[str, int] = {}  # of "list" or "watch"
        self.asked: list[Request] = []
        self.replies: set[Reply] = set()
        self._changed = asyncio.Event()

    def event(self, kind: str, content: dict[str, Any]) -> None:
        self.version += 1
        content = content | {"metadata": content.get("metadata", {}) | {"resourceVersion": str(self.version)}}
        if kind == "DELETED":
            self.slices.pop(content["metadata"]["name"])
        elif kind in ("ADDED", "MODIFIED"):
            self.slices[content["metadata"]["name"]] = content
        self.history.append((self.version, {"type": kind, "object": content}))
        self._changed.set()
        self._changed = asyncio.Event()

    def kinds(self) -> list[str]:
        return ["watch" if "watch" in request.query else "list" for request in self.asked]

    def watches(self) -> list[Request]:
        return [request for request in self.asked if "watch" in request.query]

    async def handle(self, request: Request, reply: Reply) -> None:
        self.asked.append(request)
        status = self.status.get(self.kinds()[-1], 200)
        if status != 200:
            await reply.whole(status, {"kind": "Status", "code": status})
        elif "watch" not in request.query:
            metadata = {"resourceVersion": str(self.version)}
            await reply.whole(200, {"metadata": metadata, "items": list(self.slices.values())})
        else:
            self.replies.add(reply)
            await self._watch(int(request.query["resourceVersion"]), reply)

    async def _watch(self, seen: int, reply: Reply) -> None:
        await reply.begin()
        if seen < self.forgotten:
            await reply.line({"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}})
            await reply.end()
            return
        while True:
            changed = self._changed
            for version, event in self.history:
                if version > seen:
                    seen = version
                    await reply.line(event)
            await changed.wait()


@asynccontextmanager
async def following(api: FakeApi, token: Path | None = None) -> AsyncIterator[tuple[EndpointSlices, list[Wanted]]]:
    async with serving(api.handle) as url:
        cluster = Cluster(url, "space", None if token is None else str(token))
        slices = EndpointSlices(cluster, "llm", backoff=Backoff(first_s=0.01, most_s=0.05))
        said: list[Wanted] = []

        async def follow() -> None:
            async with contextlib.aclosing(slices.watch()) as members:
                async for wanted in members:
                    said.append(wanted)

        task = asyncio.create_task(follow())
        try:
            yield slices, said
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def api_with(*names: str) -> FakeApi:
    api = FakeApi()
    api.event("ADDED", slice_of("s", *map(pod, names)))
    return api


async def test_a_list_and_then_a_watch_tell_who_is_there(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")
    api = api_with("a")
    async with following(api, token) as (_, said):
        await until(lambda: api.watches(), "the watch")
        assert [list(wanted) for wanted in said] == [["a"]]
        token.write_text("renewed\n")
        api.event("MODIFIED", slice_of("s", pod("a", ready=False, serving=True, terminating=True), pod("b")))
        await until(lambda: len(said) == 2, "the change")
        assert {name: spec.draining for name, spec in said[1].items()} == {"a": True, "b": False}
        api.event("DELETED", slice_of("s"))
        await until(lambda: said[-1] == {}, "the end")
        api.replies.pop().drop()
        await until(lambda: len(api.watches()) == 2, "the next watch")
    first, second = api.watches()
    assert first.path == "/apis/discovery.k8s.io/v1/namespaces/space/endpointslices"
    assert first.query["labelSelector"] == "kubernetes.io/service-name=llm"
    assert first.query["allowWatchBookmarks"] == "true"
    assert (first.headers["authorization"], second.headers["authorization"]) == ("Bearer first", "Bearer renewed")


async def test_a_dropped_watch_goes_on_where_it_was(caplog: pytest.LogCaptureFixture) -> None:
    api = api_with("a")
    async with following(api) as (slices, said):
        await until(lambda: api.replies, "the watch")
        api.event("BOOKMARK", {"kind": "EndpointSlice"})
        api.event("BOOKMARK", {"kind": "EndpointSlice"})
        api.event("MODIFIED", slice_of("s", pod("b")))
        await until(lambda: len(said) == 2, "the change")
        api.replies.pop().drop()
        api.event("MODIFIED", slice_of("s", pod("c")))
        await until(lambda: len(said) == 3, "the change that came meanwhile")
        assert slices.problem is None
    assert api.kinds().count("list") == 1
    assert api.watches()[1].query["resourceVersion"] == "5"
    assert [list(wanted) for wanted in said] == [["a"], ["b"], ["c"]]
    assert "keeping the replicas it named" in caplog.text


@pytest.mark.parametrize("how", ["event", "status"])
async def test_a_watch_from_too_long_ago_lists_everything_anew(how: str) -> None:
    api = api_with("a")
    async with following(api) as (slices, said):
        await until(lambda: api.replies, "the watch")
        api.status["watch"] = 410 if how == "status" else 200
        api.event("BOOKMARK", {"kind": "EndpointSlice"})
        api.slices = {}
        api.history.clear()
        api.forgotten = api.version = 50
        api.replies.pop().drop()
        await until(lambda: said[-1] == {}, "the change that no event told")
        api.status.clear()
        assert api.kinds().count("list") >= 2
        assert slices.problem is None or how == "status"


@pytest.mark.parametrize(
    ("kind", "status", "why"), [("list", 403, "let the service account get, list"), ("watch", 500, "status 500")]
)
async def test_a_refusal_is_said_and_tried_again(kind: str, status: int, why: str) -> None:
    api = api_with("a")
    api.status[kind] = status
    async with following(api) as (slices, said):
        await until(lambda: api.kinds().count(kind) >= 3, "several attempts")
        assert why in str(slices.problem)
        assert len(said) == (kind == "watch")
        api.status.clear()
        await until(lambda: slices.problem is None and said, "it answers again")
    assert [list(wanted) for wanted in said] == [["a"]]
