"""The desired replicas: the interface of every source that names them, and several sources as one."""

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol, TypeAlias

from router.members.spec import Desired, ReplicaSpec, by_name

log = logging.getLogger(__name__)

Tell: TypeAlias = Callable[[Desired], None]


class Discovery(Protocol):
    """A source of replicas. While it fails, its last answer stays valid and `problem` says why."""

    where: str  # the name in logs: the file, the URL

    @property
    def problem(self) -> str | None: ...
    async def run(self, tell: Tell, /) -> None:
        """Tell all desired replicas whenever they change, until cancelled."""


class Source:
    """Something that is read again and again."""

    def __init__(self, where: str) -> None:
        self.where = where
        self._problem: str | None = None

    @property
    def problem(self) -> str | None:
        return self._problem

    def _failed(self, why: str) -> None:
        if self._problem is None:
            log.warning("Cannot read %s: %s; keeping what it named before", self.where, why)
        self._problem = why

    def _recovered(self) -> None:
        if self._problem is not None:
            log.warning("%s can be read again", self.where)
        self._problem = None


class StaticReplicas(Source):
    """Replicas of the command line, which never change."""

    def __init__(self, specs: Iterable[ReplicaSpec]) -> None:
        super().__init__("--replica")
        self._desired = by_name(specs)

    async def run(self, tell: Tell) -> None:
        tell(self._desired)


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

    async def run(self, apply: Tell) -> None:
        """Call `apply` with all desired replicas whenever they change; runs until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for number, discovery in enumerate(self.discoveries):
                tasks.create_task(discovery.run(partial(self._told, number, apply)))
            await asyncio.get_running_loop().create_future()  # forever

    def _told(self, number: int, apply: Tell, latest: Desired) -> None:
        before, complete = self.desired(), self.complete
        self._latest[number] = latest
        desired = self.desired()
        if desired == before and self.complete == complete:
            return
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


class Backoff:
    """Exponential backoff with jitter."""

    def __init__(self, first_s: float = 0.2, most_s: float = 10.0) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._attempts = 0

    def next_s(self) -> float:
        # Doubling a float 1,100 times would overflow.
        longest_s = min(self._most_s, self._first_s * 2.0 ** min(self._attempts, 64))
        self._attempts += 1
        return longest_s * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        self._attempts = 0
