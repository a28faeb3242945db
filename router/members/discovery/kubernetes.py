"""Lists objects of one kind in Kubernetes, watches them, and lists them again; follows the pods of a pool."""

import asyncio
import logging
import re
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from functools import cache
from pathlib import Path
from typing import Any, Generic

import httpx2
import msgspec

from router.members.discovery.collection import Cluster, Collection, ItemList, Made, failure_of
from router.members.discovery.desired import Backoff, Source, Tell
from router.members.discovery.pods import pods_of
from router.members.discovery.pool import Target, pool_of
from router.members.spec import ReplicaSpec

log = logging.getLogger(__name__)

WATCH_S = 300  # length of a watch
GRACE_S = 15.0
TIMEOUT_S = 10.0  # the time for a page of a list
CONNECT_TIMEOUT_S = 2.0
PAGE = 500  # objects
TOKEN = re.compile(rb"[!-~]+")
FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 0.5  # reconnect within a second once the server is back
MAX_RELIST_S = 5.0  # a server that answers but starts no watch is asked for long lists
MAX_RETRY_AFTER_S = 10.0
# A dead machine closes no connection: the kernel notices after 10 s of silence.
KEEPALIVE = {"TCP_KEEPIDLE": 4, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 10_000}

_usual_trust = cache(ssl.create_default_context)


class ApiServerError(Exception):
    """The API server gave no usable answer."""

    def __init__(self, why: str, after_s: float = 0.0) -> None:
        super().__init__(why)
        self.after_s = after_s  # the value of Retry-After


class KubernetesWatch(Source, Generic[Made]):
    """Objects of one kind: a list, a watch from there on, and another list when that ends, however it ends."""

    def __init__(self, cluster: Cluster, collection: Collection[Any, Made]) -> None:
        super().__init__(collection.where)
        self._cluster = cluster
        self._collection = collection
        self._lost = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S)  # while there is no answer
        self._refused = Backoff(most_s=MAX_RELIST_S)  # while lists are answered, and watches tell nothing

    async def run(self, tell: Callable[[dict[str, Made]], None]) -> None:
        """Tell what is made of all objects whenever that changes, until cancelled."""
        latest: dict[str, Made] | None = None

        def changed() -> None:
            nonlocal latest
            desired = self._collection.desired()
            if desired != latest:
                latest = desired
                tell(desired)

        while True:
            try:
                await self._follow(changed)
                pause_s = self._refused.next_s()
            except ApiServerError as refusal:
                self._failed(str(refusal))
                pause_s = self._refused.next_s() + refusal.after_s
            except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
                self._failed(str(error) or type(error).__name__)
                pause_s = self._lost.next_s()
            await asyncio.sleep(pause_s)

    async def _follow(self, changed: Callable[[], None]) -> None:
        """List, then watch once."""
        async with client_of(self._cluster, WATCH_S + GRACE_S) as client:
            await self._list(client)
            changed()
            version, now_s = self._collection.resource_version, asyncio.get_running_loop().time
            asked, began_s = self._asked(watch="1", resourceVersion=version, timeoutSeconds=str(WATCH_S)), now_s()
            async with client.stream("GET", **asked) as response:
                await self._check(response)
                self._recovered()
                self._lost.reset()
                async for line in lines_of(response):
                    try:
                        is_news = self._collection.changed(line)
                    except (msgspec.DecodeError, ValueError, RecursionError) as error:
                        raise ApiServerError(f"its watch cannot be read: {error}") from error
                    self._refused.reset()
                    if is_news:
                        changed()
            if now_s() - began_s > MAX_RELIST_S:
                self._refused.reset()

    async def _list(self, client: httpx2.AsyncClient) -> None:
        # Without a resourceVersion the list is consistent, not the cache of one API server.
        pages: list[ItemList[Any]] = []
        more = {"limit": str(PAGE)}
        timeout = httpx2.Timeout(TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        while True:
            response = await client.get(**self._asked(**more), timeout=timeout)
            await self._check(response)
            try:
                pages.append(self._collection.page(response.content))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise ApiServerError(f"its list cannot be read: {error}") from error
            more["continue"] = pages[-1].metadata.next_page
            if not more["continue"]:
                self._collection.listed(pages)
                return

    def _asked(self, **more: str) -> dict[str, Any]:
        """A request's URL, parameters and headers; Kubernetes renews the token's file every hour."""
        kind, file, headers = self._collection.kind, self._cluster.token_file, dict[str, str]()
        if file is not None:
            token = Path(file).read_bytes().strip()
            if not TOKEN.fullmatch(token):
                raise ApiServerError(f"{file} holds no token of printable ASCII; use the file that Kubernetes mounts")
            headers["Authorization"] = f"Bearer {token.decode()}"
        url = self._cluster.url.rstrip("/") + kind.path(self._cluster.namespace)
        return {"url": url, "params": {kind.selects_by: self._collection.selector} | more, "headers": headers}

    async def _check(self, response: httpx2.Response) -> None:
        status = response.status_code
        if status == 200:
            return
        why, kind = f"status {status}", self._collection.kind
        if status in (401, 403):
            raise ApiServerError(
                f"{why}; let the service account get, list and watch {kind.resource} "
                f"of {kind.group or 'the core API'} in the namespace {self._cluster.namespace}"
            )
        message = failure_of(await response.aread())
        if status == 404:
            message = f"the cluster has no {kind.resource} of {kind.group}/{kind.version}; install their definition"
        raise ApiServerError(f"{why}: {message}" if message else why, retry_after_s(response))


async def lines_of(response: httpx2.Response) -> AsyncIterator[bytes]:
    """Split at line feeds only: other line ends (U+0085) may be part of an annotation."""
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.strip():
                yield line
    if rest.strip():
        raise ApiServerError("its watch ended in the middle of a line")


def client_of(cluster: Cluster, read_s: float) -> httpx2.AsyncClient:
    """A new client for each watch: the certificate authority may have been renewed."""
    trust: ssl.SSLContext | bool = False
    if cluster.url.startswith("https:"):
        trust = _usual_trust() if cluster.ca_file is None else ssl.create_default_context(cafile=cluster.ca_file)
    known = [(getattr(socket, name), value) for name, value in KEEPALIVE.items() if hasattr(socket, name)]
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), *((socket.IPPROTO_TCP, *option) for option in known)]
    transport = httpx2.AsyncHTTPTransport(verify=trust, trust_env=False, socket_options=options)
    timeout = httpx2.Timeout(TIMEOUT_S, connect=CONNECT_TIMEOUT_S, read=read_s)
    return httpx2.AsyncClient(timeout=timeout, transport=transport, trust_env=False)


def retry_after_s(response: httpx2.Response) -> float:
    value = response.headers.get("retry-after", "")
    return min(float(value), MAX_RETRY_AFTER_S) if value.isascii() and value.isdigit() else 0.0


class PoolDiscovery(Source):
    """Follows a pool, and its pods. Without a pool that can be used, those of the last one stay."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        super().__init__(f"the InferencePool {cluster.namespace}/{name}")
        self._cluster = cluster
        self._name = name
        self._pool = KubernetesWatch(cluster, pool_of(cluster.namespace, name))
        self._pods: KubernetesWatch[ReplicaSpec] | None = None  # the newest target's

    @property
    def problem(self) -> str | None:
        return self._pool.problem or self._problem or (None if self._pods is None else self._pods.problem)

    async def run(self, tell: Tell) -> None:
        latest: Target | None = None
        following: asyncio.Task[None] | None = None

        def use(found: dict[str, Target]) -> None:
            nonlocal latest, following
            target = found.get(self._name)
            unusable = "it does not exist; create it" if target is None else target.unusable
            if target is None or unusable:
                if unusable != self._problem:  # each reason is logged once, also if it follows another one
                    log.warning("%s cannot be used: %s; keeping what it named before", self.where, unusable)
                    self._problem = unusable
                return
            self._recovered()
            if target != latest:
                latest = target
                if following is not None:
                    following.cancel()
                pods = pods_of(self._cluster.namespace, target.selector, target.ports)
                self._pods = KubernetesWatch(self._cluster, pods)
                following = tasks.create_task(self._pods.run(tell))

        async with asyncio.TaskGroup() as tasks:
            await self._pool.run(use)
