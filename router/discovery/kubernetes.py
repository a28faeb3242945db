"""Replicas behind a Kubernetes service: lists its EndpointSlices, then watches them."""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncGenerator
from pathlib import Path

import httpx2
import msgspec

from router.discovery.backoff import Backoff
from router.discovery.cluster import Cluster
from router.discovery.slices import GONE, Expired, Slices
from router.discovery.wanted import Wanted

log = logging.getLogger(__name__)

WATCH_S = 240  # how long a watch lasts before it is asked for anew
GRACE_S = 15.0
TIMEOUT_S = 10.0  # of connecting and of listing
PAUSE_S = 0.2  # before the next watch, should one not last


class Refused(Exception):
    """The API server gave no usable answer."""


class EndpointSlices:
    """While the API server is gone, what it said last stays."""

    def __init__(
        self, cluster: Cluster, service: str, *, watch_s: int = WATCH_S, backoff: Backoff | None = None
    ) -> None:
        self.where = f"service {cluster.namespace}/{service}"
        self.problem: str | None = None
        self._cluster = cluster
        self._service = service
        self._watch_s = watch_s
        self._backoff = backoff or Backoff()
        self._slices = Slices()

    async def watch(self) -> AsyncGenerator[Wanted, None]:
        timeout = httpx2.Timeout(TIMEOUT_S, read=self._watch_s + GRACE_S)
        said: Wanted | None = None
        listed = False
        async with httpx2.AsyncClient(timeout=timeout, verify=self._trust(), trust_env=False) as client:
            while True:
                try:
                    async with contextlib.aclosing(self._changes(client, listed)) as changes:
                        async for wanted in changes:
                            listed = True
                            self._answered()
                            if wanted != said:
                                said = wanted
                                yield wanted
                    await asyncio.sleep(PAUSE_S)
                except Expired as gone:
                    listed = False
                    log.info("Listing %s anew: %s", self.where, gone)
                    await asyncio.sleep(PAUSE_S)
                except (Refused, httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
                    self._failed(str(error) or type(error).__name__)
                    await asyncio.sleep(self._backoff.next_s())

    async def _changes(self, client: httpx2.AsyncClient, listed: bool) -> AsyncGenerator[Wanted, None]:
        """One watch, after a list where that is due."""
        if not listed:
            response = await client.get(self._url, params=self._selector(), headers=self._headers(), timeout=TIMEOUT_S)
            self._check(response)
            self._decoded(response.content)
            yield self._slices.wanted()
        more = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._slices.resource_version,
            "timeoutSeconds": str(self._watch_s),
        }
        params = self._selector() | more
        async with client.stream("GET", self._url, params=params, headers=self._headers()) as response:
            self._check(response)
            yield self._slices.wanted()
            async for line in response.aiter_lines():
                if line and self._changed(line):
                    yield self._slices.wanted()

    @property
    def _url(self) -> str:
        cluster = self._cluster
        return f"{cluster.url.rstrip('/')}/apis/discovery.k8s.io/v1/namespaces/{cluster.namespace}/endpointslices"

    def _selector(self) -> dict[str, str]:
        return {"labelSelector": f"kubernetes.io/service-name={self._service}"}

    def _headers(self) -> dict[str, str]:
        file = self._cluster.token_file
        return {} if file is None else {"Authorization": f"Bearer {Path(file).read_text().strip()}"}

    def _trust(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self._cluster.ca_file)

    def _check(self, response: httpx2.Response) -> None:
        if response.status_code == GONE:
            raise Expired("the server answered 410")
        if response.status_code in (401, 403):
            raise Refused(
                f"status {response.status_code}; let the service account get, list and watch endpointslices "
                f"of discovery.k8s.io in the namespace {self._cluster.namespace}"
            )
        if response.status_code != 200:
            raise Refused(f"status {response.status_code}")

    def _decoded(self, body: bytes) -> None:
        try:
            self._slices.listed(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Refused(f"its list cannot be read: {error}") from error

    def _changed(self, line: str) -> bool:
        try:
            return self._slices.changed(line)
        except (msgspec.DecodeError, ValueError) as error:
            raise Refused(f"its watch cannot be read: {error}") from error

    def _failed(self, why: str) -> None:
        if self.problem is None:
            log.warning("Kubernetes does not tell of %s: %s; keeping the replicas it named", self.where, why)
        self.problem = why

    def _answered(self) -> None:
        if self.problem is not None:
            log.info("Kubernetes tells of %s again", self.where)
        self.problem = None
        self._backoff.reset()
