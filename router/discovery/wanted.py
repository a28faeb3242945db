"""What every kind of discovery says: the whole set of replicas there should be, each time that it changes."""

from collections.abc import AsyncGenerator, Mapping
from typing import NamedTuple, Protocol, TypeAlias

from router.spec import ReplicaSpec

Wanted: TypeAlias = dict[str, ReplicaSpec]  # by name


class Discovery(Protocol):
    where: str  # for logs: the file, the URL

    @property
    def problem(self) -> str | None:
        """Why what it said last may be old; None: it is not."""

    def watch(self) -> AsyncGenerator[Wanted, None]:
        """Never ends; what it said last stays true while it has a problem."""


class Difference(NamedTuple):
    added: Wanted
    removed: tuple[str, ...]
    changed: Wanted  # by their new specs

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)


def difference(old: Mapping[str, ReplicaSpec], new: Mapping[str, ReplicaSpec]) -> Difference:
    return Difference(
        added={name: spec for name, spec in new.items() if name not in old},
        removed=tuple(name for name in old if name not in new),
        changed={name: spec for name, spec in new.items() if name in old and old[name] != spec},
    )
