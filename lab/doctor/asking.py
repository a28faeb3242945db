"""Asks a router and its replicas over HTTP; reports failures, and stops only for servers that the user named."""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import TypeVar

import click
import msgspec

from lab.doctor.comparing import Loaded, Look, OfReplica, OfRouter
from router.console.asking import Client, Server, Unreachable
from router.console.samples import BadMetrics, Samples
from router.dashboard.doctor.figures import DifferingShape
from router.responses import DecisionList, ReplicaList, ReplicaStatus

ROUTER_TIMEOUT_S = 10.0
REPLICA_TIMEOUT_S = 3.0
AT_ONCE = 16
DECISIONS = 2000  # more than most routers remember
READ_EVERY_S = 0.5  # queues, between the two looks

T = TypeVar("T")

REPLICA = Server("replica", "see --replica", "see --api-key")


class ShapesStatus(msgspec.Struct):
    differing: list[DifferingShape] = []


class ModelStatus(msgspec.Struct):
    shapes: ShapesStatus | None = None


class IndexStatus(msgspec.Struct):
    models: dict[str, ModelStatus] = {}


class Asking(ExitStack):
    """Asks a router and replicas. Only replicas named on the command line get a key."""

    def __init__(
        self,
        router_url: str | None,
        replica_urls: Iterable[str],
        router_key: str | None = None,
        replica_key: str | None = None,
    ) -> None:
        super().__init__()
        self.replica_urls = tuple(dict.fromkeys(replica_urls))
        self._router: Client | None = None
        if router_url is not None:
            self._router = self.enter_context(Client(router_url, router_key, timeout_s=ROUTER_TIMEOUT_S))
        self._replica_key = replica_key
        self._replicas: dict[str, Client] = {}

    def look(self) -> Look:
        router = None
        if self._router is not None:
            try:
                metrics = Samples(self._router.ask("GET", "/metrics").decode(errors="replace")).of_all_workers()
            except BadMetrics as error:
                raise self._router.stranger(error) from error
            if metrics.total("warmroute_router:open_requests") is None:
                lacks = "its /metrics has no warmroute_router:open_requests"
                raise self._router.stranger(f"{lacks}; give --replica if it stands alone")
            replicas = self._router.get("/replicas", ReplicaList).replicas
            decided = allowed(self._router, f"/decisions?limit={DECISIONS}", DecisionList)
            router = OfRouter(
                metrics, replicas, None if decided is None else decided.decisions, differing(self._router)
            )
        known = [one.url.rstrip("/") for one in router.replicas if one.url] if router is not None else []
        asked = list(dict.fromkeys([*self.replica_urls, *known]))
        for url in asked:
            if url not in self._replicas:
                key = self._replica_key if url in self.replica_urls else None
                self._replicas[url] = self.enter_context(Client(url, key, REPLICA, REPLICA_TIMEOUT_S))
        with ThreadPoolExecutor(AT_ONCE) as threads:
            answers = dict(zip(asked, threads.map(told, (self._replicas[url] for url in asked)), strict=True))
        for url in self.replica_urls:
            if isinstance(why := answers[url], str):
                raise Unreachable(REPLICA, url, why)
        return Look(time.monotonic(), router, answers)

    def between(self) -> Sequence[ReplicaStatus]:
        return [] if self._router is None else self._router.get("/replicas", ReplicaList).replicas


def told(replica: Client) -> OfReplica | str:
    """Return a replica's answer, or the reason without one."""
    try:
        metrics, loaded = Samples(replica.ask("GET", "/metrics").decode(errors="replace")), None
        with suppress(click.ClickException):
            loaded = replica.get("/load", Loaded)
        return OfReplica(metrics, loaded)
    except Unreachable as error:
        return error.reason
    except (click.ClickException, BadMetrics) as error:
        return str(error)


def allowed(router: Client, path: str, kind: type[T]) -> T | None:
    """Return the router's answer; None if the key may not read it."""
    try:
        content = router.ask("GET", path)
    except Unreachable:
        raise
    except click.ClickException:
        return None
    return router.decode(path, content, kind)


def differing(router: Client) -> tuple[DifferingShape, ...]:
    """Return the shapes of requests whose prompts differ at a replica; none if the key may not read them."""
    found = allowed(router, "/debug/index", IndexStatus)
    models = {} if found is None else found.models
    shapes = ((name, each) for name, one in models.items() if one.shapes is not None for each in one.shapes.differing)
    return tuple(msgspec.structs.replace(each, model=name) for name, each in shapes)


def watched(
    asking: Asking, for_s: float, tell: Callable[[int], None]
) -> tuple[Look, list[Sequence[ReplicaStatus]], Look]:
    """Look twice, `for_s` apart, and at the router's replicas in between; `tell` gets the elapsed seconds."""
    first = asking.look()
    end_s, between = first.at_s + for_s, list[Sequence[ReplicaStatus]]()
    while (left_s := end_s - time.monotonic()) > 0:
        tell(int(for_s - left_s))
        time.sleep(min(READ_EVERY_S, left_s))
        if left_s > READ_EVERY_S:
            between.append(asking.between())
    return first, between, asking.look()
