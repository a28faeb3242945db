"""Replicas of an InferencePool: the pods that it selects, at its ports, however both change."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Generic, TypeVar

from router.members.discovery.cluster import Cluster
from router.members.discovery.desired import Desired, Discovery
from router.members.discovery.kubernetes import KubernetesDiscovery, KubernetesWatch
from router.members.discovery.pods import pods_of
from router.members.discovery.pool import Target, pool_of

Item = TypeVar("Item")
Choice = TypeVar("Choice")


class Ahead(Generic[Item]):
    """An endless generator whose next item is asked for beforehand, so that several can be waited for at once."""

    def __init__(self, items: AsyncGenerator[Item, None]) -> None:
        self._items = items
        self.next = asyncio.create_task(self._next())

    async def _next(self) -> Item:
        return await anext(self._items)

    def take(self) -> Item:
        item = self.next.result()
        self.next = asyncio.create_task(self._next())
        return item

    async def aclose(self) -> None:
        self.next.cancel()
        await asyncio.wait([self.next])
        await self._items.aclose()


async def switched(
    choices: AsyncGenerator[Choice, None], follow: Callable[[Choice], AsyncGenerator[Item, None]]
) -> AsyncGenerator[Item, None]:
    """Yield the items of the newest choice; those of earlier choices are closed, with all that they had not yielded."""
    newest, items = Ahead(choices), None
    try:
        while True:
            coming = (newest.next,) if items is None else (newest.next, items.next)
            await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
            if newest.next.done():
                choice = newest.take()
                if items is not None:
                    await items.aclose()
                items = Ahead(follow(choice))
            elif items is not None:
                yield items.take()
    finally:
        for each in (newest, items):
            if each is not None:
                await each.aclose()


log = logging.getLogger(__name__)


class PoolDiscovery(Discovery):
    """Follows a pool, and its pods. Without a pool that can be used, those of the last one stay."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        super().__init__(f"the InferencePool {cluster.namespace}/{name}")
        self._cluster = cluster
        self._name = name
        self._pool = KubernetesWatch(cluster, pool_of(cluster.namespace, name))
        self._pods: KubernetesDiscovery | None = None  # of the newest target

    @property
    def problem(self) -> str | None:
        return self._pool.problem or self._problem or (None if self._pods is None else self._pods.problem)

    def watch(self) -> AsyncGenerator[Desired, None]:
        def pods_at(target: Target) -> AsyncGenerator[Desired, None]:
            pods = pods_of(self._cluster.namespace, target.selector, target.ports)
            self._pods = KubernetesDiscovery(self._cluster, pods)
            return self._pods.watch()

        return switched(self._targets(), pods_at)

    async def _targets(self) -> AsyncGenerator[Target, None]:
        latest: Target | None = None
        async with aclosing(self._pool.watch()) as updates:
            async for found in updates:
                target = found.get(self._name)
                unusable = "it does not exist; create it" if target is None else target.unusable
                if not unusable:
                    self._recovered()
                elif unusable != self._problem:  # each reason is logged once, also if it follows another one
                    log.warning("%s cannot be used: %s; keeping what it named before", self.where, unusable)
                    self._problem = unusable
                if target is not None and not target.unusable and target != latest:
                    latest = target
                    yield target
