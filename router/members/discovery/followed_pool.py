"""Replicas of an InferencePool: the pods that it selects, at its ports, however both change."""

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from router.members.discovery.cluster import Cluster
from router.members.discovery.desired import Desired, Discovery
from router.members.discovery.kubernetes import KubernetesDiscovery, KubernetesWatch
from router.members.discovery.pods import pods_of
from router.members.discovery.pool import Target, pool_of
from router.members.discovery.switched import switched

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
        return switched(self._targets(), self._pods_of)

    async def _targets(self) -> AsyncGenerator[Target, None]:
        latest: Target | None = None
        async with aclosing(self._pool.watch()) as updates:
            async for found in updates:
                target = found.get(self._name)
                self._judge("it does not exist; create it" if target is None else target.unusable)
                if target is not None and not target.unusable and target != latest:
                    latest = target
                    yield target

    def _judge(self, unusable: str) -> None:
        """Log each reason once, also if it follows another one."""
        if not unusable:
            self._recovered()
        elif unusable != self._problem:
            log.warning("%s cannot be used: %s; keeping what it named before", self.where, unusable)
            self._problem = unusable

    def _pods_of(self, target: Target) -> AsyncGenerator[Desired, None]:
        pods = pods_of(self._cluster.namespace, target.selector, target.ports)
        self._pods = KubernetesDiscovery(self._cluster, pods)
        return self._pods.watch()
