"""The changes of a replica's cache that follow from its events, by block keys."""

from typing import NamedTuple, TypeAlias

from events.groups import Layout
from events.messages import BlockStored


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
    """The keys of one pool."""

    medium: str
    group: int
    keys: set[int]


class Cleared(NamedTuple):
    """The whole cache is empty. `held` has the sets of keys that were held until now, by pool; yours to keep."""

    held: tuple[Held, ...] = ()


Change: TypeAlias = Stored | Removed | Cleared | Grouped
