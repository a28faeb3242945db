"""The desired replicas, and the interface of every source that names them."""

import logging
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from typing import NamedTuple, TypeAlias

from router.members.spec import ReplicaSpec

log = logging.getLogger(__name__)

Desired: TypeAlias = dict[str, ReplicaSpec]  # by name


class Source:
    """Something that is read again and again. While it fails, its last answer stays valid and `problem` says why."""

    def __init__(self, where: str) -> None:
        self.where = where  # for logs: the file, the URL
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


class Discovery(Source, ABC):
    """A source of replicas."""

    @abstractmethod
    def watch(self) -> AsyncGenerator[Desired, None]:
        """Yield all desired replicas whenever they change, forever."""


class Difference(NamedTuple):
    added: Desired
    removed: tuple[str, ...]
    changed: Desired  # with their new specs

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)


def difference(old: Mapping[str, ReplicaSpec], new: Mapping[str, ReplicaSpec]) -> Difference:
    return Difference(
        added={name: spec for name, spec in new.items() if name not in old},
        removed=tuple(name for name in old if name not in new),
        changed={name: spec for name, spec in new.items() if name in old and old[name] != spec},
    )


class Backoff:
    """Exponential backoff with jitter."""

    def __init__(self, first_s: float = 0.2, most_s: float = 10.0, rng: random.Random | None = None) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._rng = rng or random.Random()
        self._attempts = 0

    @property
    def is_fresh(self) -> bool:
        """Tell whether nothing failed since the last reset."""
        return not self._attempts

    def next_s(self) -> float:
        # Doubling a float 1,100 times would overflow.
        longest_s = min(self._most_s, self._first_s * 2.0 ** min(self._attempts, 64))
        self._attempts += 1
        return longest_s * self._rng.uniform(0.5, 1.0)

    def reset(self) -> None:
        self._attempts = 0
