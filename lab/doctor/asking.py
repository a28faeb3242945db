"""Asks a router and its replicas over HTTP; what cannot be asked is said, and stops nothing unless it was named."""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

import click
import httpx2
import msgspec

from lab.doctor.answers import Decision, Decisions, Loaded, Look, OfReplica, OfRouter, Replicas
from router.doctor.samples import BadMetrics, Samples

ROUTER_TIMEOUT_S = 10.0
REPLICA_TIMEOUT_S = 3.0
AT_ONCE = 16
DECISIONS = 2000  # more than most routers remember
READ_EVERY_S = 0.5  # queues, between the two looks

T = TypeVar("T")


class Unreachable(click.ClickException):
    """Who was named does not answer, or is not what it should be."""

    exit_code = 2


class Asking:
    """To be closed, or used as a context manager. Only replicas named on the command line get a key."""

    def __init__(
        self,
        router_url: str | None,
        replica_urls: Iterable[str],
        router_key: str | None = None,
        replica_key: str | None = None,
    ) -> None:
        self.router_url = router_url
        self.replica_urls = tuple(dict.fromkeys(replica_urls))
        self._router_key, self._replica_key = _bearer(router_key), _bearer(replica_key)
        limits = httpx2.Limits(max_connections=2 * AT_ONCE)
        self._http = httpx2.Client(timeout=ROUTER_TIMEOUT_S, limits=limits, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def look(self) -> Look:
        router = None
        if self.router_url is not None:
            metrics = self.router_metrics()
            replicas = self._decoded("/replicas", self._checked("/replicas"), Replicas).replicas
            router = OfRouter(metrics, replicas, self._decisions())
        known = [one.url.rstrip("/") for one in router.replicas] if router is not None else []
        asked = list(dict.fromkeys([*self.replica_urls, *known]))
        with ThreadPoolExecutor(AT_ONCE) as threads:
            answers = dict(zip(asked, threads.map(self._replica, asked), strict=True))
        for url in self.replica_urls:
            if isinstance(why := answers[url], str):
                raise Unreachable(f"no replica answers at {url}: {why}; see --replica")
        return Look(time.monotonic(), router, answers)

    # ---- the router

    def router_metrics(self) -> Samples:
        text = self._checked("/metrics").text
        try:
            samples = Samples(text)
        except BadMetrics as error:
            raise Unreachable(f"what answers at {self.router_url} is no router: {error}; see --router") from error
        if samples.total("warmroute_router:open_requests") is None:
            raise Unreachable(
                f"what answers at {self.router_url} is no router: its /metrics has no warmroute_router:open_requests; "
                "see --router, and --replica for one that stands alone"
            )
        return samples

    def _decisions(self) -> list[Decision] | None:
        answer = self._get(path := f"/decisions?limit={DECISIONS}")
        return self._decoded(path, answer, Decisions).decisions if answer.status_code == 200 else None

    def _decoded(self, path: str, answer: httpx2.Response, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(answer.content, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Unreachable(f"what answers at {self.router_url}{path} is no router: {error}; see --router") from error

    def _checked(self, path: str) -> httpx2.Response:
        answer = self._get(path)
        if answer.status_code in (401, 403):
            raise Unreachable(f"the router at {self.router_url} demands a key for {path}; see --admin-key")
        if answer.status_code != 200:
            raise Unreachable(
                f"what answers at {self.router_url}{path} is no router: status {answer.status_code}; see --router"
            )
        return answer

    def _get(self, path: str) -> httpx2.Response:
        try:
            return self._http.get(f"{self.router_url}{path}", headers=self._router_key)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            raise Unreachable(f"no router answers at {self.router_url}: {reason}; see --router") from error

    # ---- replicas

    def _replica(self, url: str) -> OfReplica | str:
        """Or why there is no answer."""
        key = self._replica_key if url in self.replica_urls else {}
        try:
            answer = self._http.get(f"{url}/metrics", headers=key, timeout=REPLICA_TIMEOUT_S)
            if answer.status_code != 200:
                return f"/metrics answers with status {answer.status_code}"
            load = self._http.get(f"{url}/load", headers=key, timeout=REPLICA_TIMEOUT_S)
            return OfReplica(Samples(answer.text), _loaded(load))
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            return str(error) or type(error).__name__
        except BadMetrics as error:
            return str(error)


def _bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


def _loaded(answer: httpx2.Response) -> Loaded | None:
    try:
        return msgspec.json.decode(answer.content, type=Loaded) if answer.status_code == 200 else None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def watched(asking: Asking, for_s: float, tell: Callable[[int], None]) -> tuple[Look, list[Samples], Look]:
    """Two looks, so many seconds apart, and the router's metrics in between; `tell` gets the seconds that are over."""
    first = asking.look()
    end_s, between = first.at_s + for_s, []
    while (left_s := end_s - time.monotonic()) > 0:
        tell(int(for_s - left_s))
        time.sleep(min(READ_EVERY_S, left_s))
        if first.router is not None and left_s > READ_EVERY_S:
            between.append(asking.router_metrics())
    return first, between, asking.look()
