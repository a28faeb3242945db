"""A list and a watch of pods, on a server that drops, forgets and refuses."""

import asyncio
import logging
import shutil
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from router.members.discovery.collection import Cluster, in_cluster
from router.members.discovery.kubernetes import KEEPALIVE, KubernetesWatch, client_of
from router.members.discovery.pods import pods_of
from router.members.spec import Desired, ReplicaSpec
from tests.router.kubernetes_api import PODS, SPACE, KubernetesApi, Refusal, following, pod, refusing
from tests.router.loopback import Request, certificate, until, with_openssl

pytestmark = pytest.mark.virtual


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
    watch = KubernetesWatch(cluster, pods_of(SPACE, "app=llm"))
    async with api.running(), following(watch) as said:
        yield watch, said


def api_with(*names: str) -> KubernetesApi:
    api = KubernetesApi()
    for name in names:
        api.put(PODS, pod(name))
    return api


async def test_a_list_and_then_a_watch_find_the_members(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")
    api = api_with("a")
    async with watching(api, token) as (_, said):
        await until(lambda: api.watched, "the watch")
        assert [list(wanted) for wanted in said] == [["a"]]
        token.write_text("renewed\n")
        api.put(PODS, pod("a", ending=True))
        api.put(PODS, pod("b"))
        await until(lambda: len(said) == 3, "the changes")
        assert {name: spec.draining for name, spec in said[2].items()} == {"a": True, "b": False}
        api.delete(PODS, "a")
        await until(lambda: list(said[-1]) == ["b"], "the end")
        api.drop()
        await until(lambda: len(api.watches()) == 2, "the next watch")
    first, second = api.watches()
    assert first.path == PODS
    assert first.query["labelSelector"] == "app=llm"
    assert (first.headers["authorization"], second.headers["authorization"]) == ("Bearer first", "Bearer renewed")


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
async def test_an_authority_that_was_replaced_is_read_again(tmp_path: Path) -> None:
    api = api_with("a")
    authority, key = certificate(tmp_path, "first")
    api.tls = tls_of(authority, key)
    async with watching(api, authority=authority) as (watch, said):
        await until(lambda: api.watched, "the watch")
        await api.stop()
        second, key = certificate(tmp_path, "second")
        api.tls = tls_of(second, key)
        api.put(PODS, pod("b"))
        await api.start()
        await until(lambda: "certificate" in str(watch.problem), "the refusal of whom nobody vouches for")
        assert list(said[-1]) == ["a"]
        shutil.copy(second, authority)
        # A watch has begun then: httpcore2 leaves a connection open that is cancelled in its TLS handshake.
        await until(lambda: list(said[-1]) == ["a", "b"] and watch.problem is None, "the change, and the watch")


@pytest.mark.virtual(False)
@with_openssl
async def test_without_an_authority_those_of_the_system_count(tmp_path: Path) -> None:
    api = api_with("a")
    api.tls = tls_of(*certificate(tmp_path))
    async with watching(api) as (watch, said):
        await until(lambda: "certificate" in str(watch.problem), "the refusal")
    assert said == []


async def test_only_a_line_feed_ends_a_line() -> None:
    api = api_with("a")
    async with watching(api) as (watch, said):
        await until(lambda: api.watched, "the watch")
        api.put(PODS, pod("b", annotations={"note": "one\x85two\u2028three"}))
        await until(lambda: len(said) == 2, "the change")
        assert watch.problem is None
    assert len(api.asked) == 2


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


@pytest.mark.parametrize("status", [400, 410])
async def test_a_server_that_lists_but_lets_no_watch_begin_is_asked_less_and_less(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "router.members.discovery")
    api = api_with("a")
    asked_at: list[float] = []

    def refuses(request: Request) -> Refusal | None:
        if "watch" in request.query:
            asked_at.append(asyncio.get_running_loop().time())
        return refusing("watch", status)(request)

    api.refusals.append(refuses)
    async with watching(api) as (watch, said):
        await until(lambda: len(asked_at) == 4, "several attempts")
        assert asked_at[3] - asked_at[0] > 0.1 + 0.2 + 0.4
        assert api.kinds()[:8] == ["list", "watch"] * 4
        why = f"status {status}: refused with {status}"
        assert watch.problem == why
        failure = f"Cannot read pods space/app=llm: {why}; keeping what it named before"
        assert caplog.messages == [failure]
        api.put(PODS, pod("b"))
        api.refusals.clear()
        await until(lambda: [*said[-1]] == ["a", "b"] and watch.problem is None, "the watch")
        assert caplog.messages[-1] == "pods space/app=llm can be read again"
    assert [list(wanted) for wanted in said] == [["a"], ["a", "b"]]


async def test_a_watch_that_ends_with_an_error_at_once_is_asked_for_less_and_less() -> None:
    api = api_with("a")
    asked_at: list[float] = []

    def compacts(request: Request) -> None:
        if "watch" in request.query:
            asked_at.append(asyncio.get_running_loop().time())
            api.version += 1
            api.forget()

    api.refusals.append(compacts)
    async with watching(api):
        await until(lambda: len(asked_at) == 4, "several attempts")
    assert asked_at[3] - asked_at[0] > 0.1 + 0.2 + 0.4


@pytest.mark.virtual(False)
async def test_a_server_without_a_machine_would_be_noticed_in_ten_seconds() -> None:
    """The kernel's part: nobody here can take a machine away."""
    api = api_with("a")
    client = client_of(Cluster(api.url, SPACE), 1.0)
    async with api.running(), client, client.stream("GET", api.url + PODS) as response:
        connection: socket.socket = response.extensions["network_stream"].get_extra_info("socket")
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        for option, value in KEEPALIVE.items():
            if hasattr(socket, option):
                assert connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, option)) == value
    assert KEEPALIVE["TCP_KEEPIDLE"] + KEEPALIVE["TCP_KEEPINTVL"] * KEEPALIVE["TCP_KEEPCNT"] == 10
