"""Kubernetes' EndpointSlices: their meaning, and a watch on a server that drops, forgets and refuses."""

import asyncio
import logging
import shutil
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from router.members.discovery.collection import Cluster, Collection, Expired, in_cluster
from router.members.discovery.desired import Backoff
from router.members.discovery.kubernetes import KEEPALIVE, PAGE, KubernetesWatch, client_of
from router.members.discovery.slices import Conditions, Slice, is_draining, slices_of
from router.members.spec import Desired, ReplicaSpec
from tests.router.kubernetes_api import SLICES, SPACE, KubernetesApi, Refusal, following
from tests.router.loopback import Reply, Request, certificate, until, with_openssl

pytestmark = pytest.mark.virtual


HTTP_PORT = {"name": "http", "port": 8000, "protocol": "TCP"}
EVENTS = [{"name": "events", "port": 5557}, {"name": "replay", "port": 5558, "protocol": "TCP"}]


def slice_of(name: str, *endpoints: dict[str, Any], ports: Any = None, family: str = "IPv4") -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": "llm"}},
        "addressType": family,
        "endpoints": list(endpoints),
        "ports": [HTTP_PORT] if ports is None else ports,
    }


def pod(name: str, address: str = "10.0.0.1", **conditions: bool) -> dict[str, Any]:
    target = {"kind": "Pod", "name": name, "uid": f"uid-{name}", "namespace": "default"}
    return {"addresses": [address], "conditions": {"ready": True} | conditions, "targetRef": target}


def listed(*slices: dict[str, Any]) -> Collection[Slice, ReplicaSpec]:
    made = slices_of(SPACE, "llm")
    made.listed([made.page(msgspec.json.encode({"metadata": {"resourceVersion": "5"}, "items": slices}))])
    return made


# ---- what slices mean


def test_a_ready_pod_is_a_replica_by_its_name_and_ports() -> None:
    slices = listed(slice_of("s", pod("p"), ports=[HTTP_PORT, *EVENTS]))
    spec = slices.desired()["p"]
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
    assert list(listed(slice_of("s", bare, family="IPv6")).desired()) == ["[2001:db8::1]:8000"]


def test_the_only_port_is_that_of_http() -> None:
    for ports in ([{"port": 8000}], [{"name": "web", "port": 8000}], [{"name": "", "port": 8000}]):
        assert listed(slice_of("s", pod("p"), ports=ports)).desired()["p"].url == "http://10.0.0.1:8000"


def test_without_a_port_of_http_there_is_no_replica_and_the_log_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    slices = listed(slice_of("s", pod("p"), ports=[{"name": "web", "port": 1}, *EVENTS]))
    assert slices.desired() == slices.desired() == {}
    again = slice_of("s", pod("p"), ports=[{"name": "web", "port": 2}, *EVENTS])
    again["metadata"]["resourceVersion"] = "6"
    assert not slices.changed(msgspec.json.encode({"type": "MODIFIED", "object": again}))
    assert [record.getMessage() for record in caplog.records] == [
        "service space/llm: its slice s has an endpoint that cannot be used: 10.0.0.1 has no port named http; "
        "name its ports http, events, replay, status, snapshot"
    ]


def test_a_pod_of_two_families_counts_once() -> None:
    six = slice_of("a", pod("p", "2001:db8::1"), family="IPv6")
    wanted = listed(six, slice_of("b", pod("p"))).desired()
    assert [spec.url for spec in wanted.values()] == ["http://10.0.0.1:8000"]


@pytest.mark.parametrize(
    ("conditions", "draining"),
    [
        ({}, False),
        ({"ready": True}, False),
        ({"ready": False}, None),
        ({"ready": False, "serving": True, "terminating": True}, True),
        ({"ready": False, "serving": False, "terminating": True}, True),
        ({"ready": False, "serving": True, "terminating": False}, None),
        ({"ready": True, "serving": True, "terminating": False}, False),
    ],
)
def test_conditions_say_whether_it_takes_requests(conditions: dict[str, bool], draining: bool | None) -> None:
    assert is_draining(msgspec.convert(conditions, Conditions)) is draining
    found = listed(slice_of("s", pod("p") | {"conditions": conditions})).desired()
    assert [spec.draining for spec in found.values()] == ([] if draining is None else [draining])


def test_labels_of_the_service_say_what_its_replicas_are(caplog: pytest.LogCaptureFixture) -> None:
    labelled = slice_of("s", pod("p"))
    labelled["metadata"]["labels"] |= {"warmroute/engine": "vllm", "warmroute/block-size": "32"}
    spec = listed(labelled).desired()["p"]
    assert (spec.engine, spec.block_size) == ("vllm", 32)
    labelled["metadata"]["labels"]["warmroute/block-size"] = "much"
    assert list(listed(labelled, slice_of("t", pod("q"))).desired()) == ["q"]
    assert caplog.messages == [
        "service space/llm: its slice s cannot be used: warmroute/block-size is 'much'; "
        "write a whole number from 1 to 2147483647"
    ]


@pytest.mark.parametrize(
    ("label", "value", "said"),
    [
        ("tier", "gold", "has a key that is ignored: warmroute/tier is not known; "),
        (
            "engine",
            "vlm",
            "engine is 'vlm'; write auto, warmroute, vllm, sglang, trtllm or openai; its last valid value still",
        ),
        ("block-size", "16k", "whole number from 1 to 2147483647; its last valid value still counts"),
    ],
)
def test_a_mistyped_label_of_the_service_takes_no_replica_away(
    label: str, value: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = slice_of("s", pod("p"), pod("x" * 200))  # of which one can never be used
    good["metadata"]["labels"]["warmroute/engine"] = "vllm"
    slices = listed(good)
    caplog.clear()
    mistyped = slice_of("s", pod("p", terminating=True), pod("q"))
    mistyped["metadata"]["labels"] |= {"warmroute/engine": "vllm", f"warmroute/{label}": value}
    mistyped["metadata"]["resourceVersion"] = "6"
    assert slices.changed(msgspec.json.encode({"type": "MODIFIED", "object": mistyped}))
    found = {name: (spec.engine, spec.draining) for name, spec in slices.desired().items()}
    assert found == {"p": ("vllm", True), "q": ("vllm", False)}
    (message,) = caplog.messages
    assert said in message


def test_lists_that_are_null_are_empty() -> None:
    empty = slice_of("s") | {"endpoints": None, "ports": None}
    assert listed(empty).desired() == {}


def test_events_of_a_watch_change_the_slices() -> None:
    slices = listed()

    def event(kind: str, content: dict[str, Any], version: str) -> bool:
        content["metadata"]["resourceVersion"] = version
        return slices.changed(msgspec.json.encode({"type": kind, "object": content}))

    assert event("ADDED", slice_of("s", pod("p")), "6")
    assert list(slices.desired()) == ["p"]
    assert event("MODIFIED", slice_of("s", pod("q")), "7")
    assert list(slices.desired()) == ["q"]
    assert not event("BOOKMARK", {"metadata": {}}, "9")
    assert slices.resource_version == "9"
    assert event("DELETED", slice_of("s", pod("q")), "10")
    assert slices.desired() == {}
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
        with pytest.raises(ValueError, match=r"has no pod service account.*kubectl proxy"):
            in_cluster(env, folder=folder)


# ---- the watch


@asynccontextmanager
async def watching(
    api: KubernetesApi, token: Path | None = None, authority: Path | None = None
) -> AsyncIterator[tuple[KubernetesWatch[ReplicaSpec], list[Desired]]]:
    files = [None if path is None else str(path) for path in (token, authority)]
    cluster = Cluster(api.url, SPACE, *files)
    watch = KubernetesWatch(cluster, slices_of(SPACE, "llm"), backoff=Backoff(first_s=0.01, most_s=0.05))
    async with api.running(), following(watch) as said:
        yield watch, said


def api_with(*names: str) -> KubernetesApi:
    api = KubernetesApi()
    api.put(SLICES, slice_of("s", *map(pod, names)))
    return api


def refusing(kind: str, status: int, **headers: str) -> Any:
    def refuses(request: Request) -> Refusal | None:
        asked = "watch" if "watch" in request.query else "list"
        return (status, headers) if asked == kind else None

    return refuses


async def test_a_list_and_then_a_watch_find_the_members(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")
    api = api_with("a")
    async with watching(api, token) as (_, said):
        await until(lambda: api.watched, "the watch")
        assert [list(wanted) for wanted in said] == [["a"]]
        token.write_text("renewed\n")
        api.put(SLICES, slice_of("s", pod("a", ready=False, serving=True, terminating=True), pod("b")))
        await until(lambda: len(said) == 2, "the change")
        assert {name: spec.draining for name, spec in said[1].items()} == {"a": True, "b": False}
        api.delete(SLICES, "s")
        await until(lambda: said[-1] == {}, "the end")
        api.drop()
        await until(lambda: len(api.watches()) == 2, "the next watch")
    first, second = api.watches()
    assert first.path == SLICES
    assert first.query["labelSelector"] == "kubernetes.io/service-name=llm"
    assert first.query["allowWatchBookmarks"] == "true"
    assert (first.headers["authorization"], second.headers["authorization"]) == ("Bearer first", "Bearer renewed")


async def test_a_token_that_was_replaced_is_read_relist(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("old")
    api = api_with("a")
    api.refusals.append(
        lambda request: (401, {}) if request.headers["authorization"] == "Bearer old" else None,
    )
    async with watching(api, token) as (watch, said):
        await until(lambda: watch.problem, "the refusal")
        token.write_text("new")
        await until(lambda: said and watch.problem is None, "the watch")


@pytest.mark.parametrize("written", ["tök".encode(), b"\xff\xfe", b"a\nb", b"a b", b""])
async def test_a_token_that_no_header_can_carry_is_waited_for(written: bytes, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_bytes(written)
    async with watching(api_with("a"), token) as (watch, said):
        await until(lambda: watch.problem, "the refusal")
        assert watch.problem == f"{token} holds no token of printable ASCII; use the file that Kubernetes mounts"
        token.write_text("good\n")
        await until(lambda: said and watch.problem is None, "the watch")


def tls_of(cert: Path, key: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    return context


@pytest.mark.virtual(False)
@with_openssl
async def test_an_authority_that_was_replaced_is_read_relist(tmp_path: Path) -> None:
    api = api_with("a")
    authority, key = certificate(tmp_path, "first")
    api.tls = tls_of(authority, key)
    async with watching(api, authority=authority) as (watch, said):
        await until(lambda: api.watched, "the watch")
        await api.stop()
        second, key = certificate(tmp_path, "second")
        api.tls = tls_of(second, key)
        api.put(SLICES, slice_of("s", pod("b")))
        await api.start()
        await until(lambda: "certificate" in str(watch.problem), "the refusal of whom nobody vouches for")
        assert list(said[-1]) == ["a"]
        shutil.copy(second, authority)
        await until(lambda: list(said[-1]) == ["b"], "the change")


@pytest.mark.virtual(False)
@with_openssl
async def test_without_an_authority_those_of_the_system_count(tmp_path: Path) -> None:
    api = api_with("a")
    api.tls = tls_of(*certificate(tmp_path))
    async with watching(api) as (watch, said):
        await until(lambda: "certificate" in str(watch.problem), "the refusal")
    assert said == []


async def test_a_dropped_watch_continues_where_it_was(caplog: pytest.LogCaptureFixture) -> None:
    api = api_with("a")
    async with watching(api) as (watch, said):
        await until(lambda: api.watched, "the watch")
        api.bookmark(SLICES)
        api.bookmark(SLICES)
        api.put(SLICES, slice_of("s", pod("b")))
        await until(lambda: len(said) == 2, "the change")
        api.forget()  # but for what the bookmarks and the change have told
        api.drop()
        api.put(SLICES, slice_of("s", pod("c")))
        await until(lambda: len(said) == 3, "the change that came meanwhile")
        assert watch.problem is None
    assert api.kinds().count("list") == 1
    assert api.watches()[1].query["resourceVersion"] == "104"
    assert [list(wanted) for wanted in said] == [["a"], ["b"], ["c"]]
    assert "keeping what it named" in caplog.text


@pytest.mark.parametrize("how", ["event", "status"])
async def test_a_watch_from_too_long_ago_lists_everything_relist(how: str) -> None:
    api = api_with("a")
    async with watching(api) as (_, said):
        await until(lambda: api.watched, "the watch")
        await api.stop()
        api.delete(SLICES, "s")
        api.forget()
        if how == "status":
            api.refusals.append(lambda request: refusing("watch", 410)(request) if len(api.watches()) == 2 else None)
        await api.start()
        await until(lambda: said[-1] == {}, "the change that no event told")
        assert api.kinds().count("list") == 2


async def test_a_watch_that_goes_back_is_settled_by_a_list() -> None:
    api = api_with("a")
    async with watching(api) as (_, said):
        await until(lambda: api.watched, "the watch")
        api.put(SLICES, slice_of("s", pod("b")))
        await until(lambda: len(said) == 2, "the change")
        api.say_again(SLICES)
        await until(lambda: api.kinds().count("list") == 2, "the list")
        api.put(SLICES, slice_of("s", pod("c")))
        await until(lambda: len(said) == 3, "the next change")
    assert [list(wanted) for wanted in said] == [["a"], ["b"], ["c"]]


async def test_a_long_list_is_read_page_by_page_and_counts_when_it_is_whole() -> None:
    api = KubernetesApi()
    for number in range(2 * PAGE + 1):
        api.put(SLICES, slice_of(f"s{number}", pod(f"p{number}")))
    async with watching(api) as (_, said):
        await until(lambda: api.watched, "the watch")
    assert api.kinds().count("list") == 3
    assert [len(wanted) for wanted in said] == [2 * PAGE + 1]


async def test_a_list_whose_next_page_is_gone_begins_again() -> None:
    api = KubernetesApi()
    for number in range(PAGE + 1):
        api.put(SLICES, slice_of(f"s{number}", pod(f"p{number}")))

    def forgets_once(_: Request) -> Refusal | None:
        if len(api.asked) == 2:
            api.forget()
        return None

    api.refusals.append(forgets_once)
    async with watching(api) as (_, said):
        await until(lambda: said, "the list")
    assert [bool(request.query.get("continue")) for request in api.asked[:4]] == [False, True, False, True]
    assert len(said[0]) == PAGE + 1


async def test_half_a_line_is_no_event() -> None:
    api = api_with("a")
    async with watching(api) as (_, said):
        await until(lambda: api.watched, "the watch")
        api.torn = True
        api.put(SLICES, slice_of("s", pod("b")))
        await until(lambda: len(said) == 2, "the change, by the next watch")
    assert api.kinds()[:3] == ["list", "watch", "watch"]
    assert list(said[1]) == ["b"]


async def test_only_a_line_feed_ends_a_line() -> None:
    api = api_with("a")
    async with watching(api) as (watch, said):
        await until(lambda: api.watched, "the watch")
        changed = slice_of("s", pod("b"))
        changed["metadata"]["annotations"] = {"note": "one\x85two\u2028three"}
        api.put(SLICES, changed)
        await until(lambda: len(said) == 2, "the change")
        assert watch.problem is None
    assert len(api.asked) == 2


@pytest.mark.parametrize(
    ("kind", "status", "why"),
    [
        ("list", 403, "let the service account get, list and watch endpointslices of discovery.k8s.io in"),
        ("watch", 500, "status 500: refused with 500"),
    ],
)
async def test_a_refusal_is_reported_and_tried_again(kind: str, status: int, why: str) -> None:
    api = api_with("a")
    api.refusals.append(refusing(kind, status))
    async with watching(api) as (watch, said):
        await until(lambda: api.kinds().count(kind) >= 3, "several attempts")
        assert why in str(watch.problem)
        assert len(said) == (kind == "watch")
        api.refusals.clear()
        await until(lambda: watch.problem is None and said, "it answers again")
    assert [list(wanted) for wanted in said] == [["a"]]


@pytest.mark.parametrize("kind", ["list", "watch"])
async def test_an_answer_that_is_not_of_kubernetes_changes_nothing(kind: str) -> None:
    api = api_with("a")
    real = api._handle
    answered: list[str] = []

    async def as_a_portal_does(request: Request, reply: Reply) -> None:
        asked = "watch" if "watch" in request.query else "list"
        if asked != kind or len(answered) == 2:
            await real(request, reply)
        else:
            answered.append(asked)
            await reply.whole(502 if len(answered) == 1 else 200, b"<p>No.</p>\n")

    api._handle = as_a_portal_does  # type: ignore[method-assign]
    async with watching(api) as (watch, said):
        await until(lambda: answered and watch.problem == "status 502", "the first")
        await until(lambda: f"its {kind} cannot be read" in str(watch.problem), "the second")
        await until(lambda: api.watched, "the watch")
        assert [list(wanted) for wanted in said] == [["a"]]


@pytest.mark.parametrize("status", [429, 503])
async def test_a_server_that_says_when_is_asked_then(status: int) -> None:
    api = api_with("a")
    asked_at: list[float] = []

    def busy_once(_: Request) -> Refusal | None:
        asked_at.append(asyncio.get_running_loop().time())
        return (status, {"retry_after": "1"}) if len(asked_at) == 1 else None

    api.refusals.append(busy_once)
    async with watching(api) as (_, said):
        await until(lambda: said, "the list")
    assert 1.0 <= asked_at[1] - asked_at[0] < 5.0


async def test_a_watch_that_is_refused_for_what_it_asks_begins_with_a_list() -> None:
    api = api_with("a")
    api.refusals.append(lambda request: refusing("watch", 400)(request) if len(api.watches()) == 1 else None)
    async with watching(api):
        await until(lambda: api.watched, "the second watch")
    assert api.kinds() == ["list", "watch", "list", "watch"]


@pytest.mark.parametrize(
    ("status", "said_first"),
    [(400, []), (410, ["Listing service space/llm again: the server answered 410"])],
)
async def test_a_server_that_lists_but_lets_no_watch_begin_is_asked_less_and_less(
    status: int, said_first: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "router.members.discovery")
    api = api_with("a")
    asked_at: list[float] = []

    def refuses(request: Request) -> Refusal | None:
        if "watch" in request.query:
            asked_at.append(asyncio.get_running_loop().time())
        return refusing("watch", status)(request)  # type: ignore[no-any-return]

    api.refusals.append(refuses)
    async with watching(api) as (watch, said):
        await until(lambda: len(asked_at) == 4, "several attempts")
        assert asked_at[3] - asked_at[0] > 0.1 + 0.2 + 0.4
        assert api.kinds()[:8] == ["list", "watch"] * 4
        why = f"status {status}: refused with {status}"
        assert watch.problem == why
        failure = f"Cannot read service space/llm: {why}; keeping what it named before"
        assert caplog.messages == [*said_first, failure]
        api.put(SLICES, slice_of("s", pod("b")))
        api.refusals.clear()
        await until(lambda: [*said[-1]] == ["b"] and watch.problem is None, "the watch")
        assert caplog.messages[-1] == "service space/llm can be read again"
        await until(lambda: api.watched, "the watch, as it sees it")
        api.bookmark(SLICES)
        await until(lambda: watch._relist.is_fresh, "what is waited for now")
    assert [list(wanted) for wanted in said] == [["a"], ["b"]]


async def test_a_watch_that_ends_with_an_error_at_once_is_asked_for_less_and_less() -> None:
    api = api_with("a")
    real = api._handle
    asked_at: list[float] = []

    async def fails(request: Request, reply: Reply) -> None:
        if "watch" not in request.query:
            await real(request, reply)
            return
        asked_at.append(asyncio.get_running_loop().time())
        await reply.begin()
        await reply.line({"type": "ERROR", "object": {"code": 410, "message": "too old"}})
        await reply.end()

    api._handle = fails  # type: ignore[method-assign]
    async with watching(api):
        await until(lambda: len(asked_at) == 4, "several attempts")
    assert asked_at[3] - asked_at[0] > 0.1 + 0.2 + 0.4


@pytest.mark.virtual(False)
async def test_a_server_without_a_machine_would_be_noticed_in_ten_seconds() -> None:
    """The kernel's part: nobody here can take a machine away."""
    api = api_with("a")
    client = client_of(Cluster(api.url, SPACE), 1.0)
    async with api.running(), client, client.stream("GET", api.url + SLICES) as response:
        connection: socket.socket = response.extensions["network_stream"].get_extra_info("socket")
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        for option, value in KEEPALIVE.items():
            if hasattr(socket, option):
                assert connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, option)) == value
    assert KEEPALIVE["TCP_KEEPIDLE"] + KEEPALIVE["TCP_KEEPINTVL"] * KEEPALIVE["TCP_KEEPCNT"] == 10
