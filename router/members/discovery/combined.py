"""Several sources of replicas as one, and the source of those named on the command line."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence

from router.members.discovery.desired import Desired, Discovery
from router.members.spec import ReplicaSpec, by_name

log = logging.getLogger(__name__)


class StaticReplicas(Discovery):
    """Replicas of the command line, which never change."""

    def __init__(self, specs: Iterable[ReplicaSpec]) -> None:
        super().__init__("--replica")
        self._desired = by_name(specs)

    async def watch(self) -> AsyncGenerator[Desired, None]:
        yield self._desired
        await asyncio.get_running_loop().create_future()  # forever


class CombinedDiscovery:
    """The union of all sources; of two replicas with one name, the one from the earlier source counts."""

    def __init__(self, discoveries: Sequence[Discovery]) -> None:
        self.discoveries = discoveries
        self._latest: list[Desired | None] = [None] * len(discoveries)
        self._disputed: set[str] = set()

    @property
    def complete(self) -> bool:
        """Tell whether each source has answered at least once."""
        return None not in self._latest

    def problems(self) -> dict[str, str]:
        return {each.where: each.problem for each in self.discoveries if each.problem is not None}

    async def run(self, apply: Callable[[Desired], None]) -> None:
        """Call `apply` with all desired replicas whenever they change; runs until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for number, discovery in enumerate(self.discoveries):
                tasks.create_task(self._follow(number, discovery, apply))

    async def _follow(self, number: int, discovery: Discovery, apply: Callable[[Desired], None]) -> None:
        async with contextlib.aclosing(discovery.watch()) as updates:
            async for latest in updates:
                before, complete = self.desired(), self.complete
                self._latest[number] = latest
                desired = self.desired()
                if desired == before and self.complete == complete:
                    continue
                try:
                    apply(desired)
                except Exception:  # any mistake in applying it: later updates, and other sources, still count
                    log.exception("The discovered replicas could not be applied")

    def desired(self) -> Desired:
        desired: Desired = {}
        disputed: set[str] = set()
        for latest in self._latest:
            for name, spec in (latest or {}).items():
                if desired.setdefault(name, spec) is not spec and desired[name] != spec:
                    disputed.add(name)
        for name in disputed - self._disputed:
            log.warning("Two sources name the replica %s; using the one at %s", name, desired[name].url)
        self._disputed = disputed
        return desired
