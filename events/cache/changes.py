"""The changes of a replica's cache that follow from its events, by block keys."""

from collections import deque
from collections.abc import Collection
from typing import NamedTuple, TypeAlias

from events.cache.groups import Layout
from events.messages import BlockStored

REMEMBERED_BLOCKS = 4096  # stored and removed lately, of one replica


class Grouped(NamedTuple):
    """The replica's groups are these from now on; None: one that keeps whole prefixes."""

    layout: Layout | None


class Stored(NamedTuple):
    """Blocks that got a key. `chain` has the key of every block of the event, `keys` those new in this pool."""

    medium: str
    keys: list[int]
    chain: list[int]
    parent_key: int
    event: BlockStored
    group: int = 0


class Removed(NamedTuple):
    """Keys without a remaining copy in this pool."""

    medium: str
    keys: list[int]
    group: int = 0


class Held(NamedTuple):
    medium: str
    group: int
    keys: set[int]


class Cleared(NamedTuple):
    """The whole cache is empty. `held` has the sets of keys that were held until now, by pool; yours to keep."""

    held: tuple[Held, ...] = ()


Change: TypeAlias = Stored | Removed | Cleared | Grouped


class RecentChanges:
    """The latest stores and removals of one replica since its last reset, each with a number."""

    def __init__(self) -> None:
        self.resets = 0
        self.latest = 0  # number
        self._changes: deque[tuple[int, bool, list[int]]] = deque()  # numbers, whether stored, and the blocks
        self._blocks = 0

    def add(self, keys: list[int], *, stored: bool) -> None:
        if not keys:
            return
        self.latest += 1
        self._changes.append((self.latest, stored, keys))
        self._blocks += len(keys)
        while self._blocks > REMEMBERED_BLOCKS:
            self._blocks -= len(self._changes.popleft()[2])

    def reset(self) -> None:
        self.resets += 1
        self._changes.clear()
        self._blocks = 0

    def has_changed(self, resets: int, number: int, keys: Collection[int], *, stored: bool) -> bool | None:
        """Return whether one of the blocks was stored, or removed, after a change; None: too much has changed to tell.

        `resets`: before that change.
        """
        if resets != self.resets:
            return None if stored else True
        first = self._changes[0][0] if self._changes else self.latest + 1
        if first > number + 1:
            return None
        looked_for = frozenset(keys)
        return any(
            later > number and stored is was_stored and not looked_for.isdisjoint(changed)
            for later, was_stored, changed in self._changes
        )
