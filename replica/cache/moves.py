"""Moves of blocks between media, as the pool orders them and a mover carries them out."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from msgspec import Struct, field

from replica.cache.chain import Chain
from replica.disk.record import Record

PULLED = "PULL"  # a neighbour is a source like a medium
# Called after each block, with the thread's processor time that it took and the longest pause that leaves time for the
# rest.
GiveWay: TypeAlias = Callable[[float, float], None]


class Save(NamedTuple):
    """Copy the KV of a pool's block to a slot of the host's memory."""

    block: int
    slot: int


class Load(NamedTuple):
    """Copy the KV from a slot of a lower medium to a pool's block."""

    slot: int
    block: int
    medium: str
    record: Record | None = None  # the record that a disk's slot should hold


class Write(NamedTuple):
    """Copy the KV from a slot of the host's memory to one of the disk's."""

    source: int
    slot: int
    record: Record


class Written(NamedTuple):
    write: Write
    done: bool


class Pull(NamedTuple):
    """Read a chain's blocks from `start` on from a neighbour into the pool's, as many as there are of these."""

    endpoint: str
    chain: Chain
    start: int
    blocks: Sequence[int]
    patience_s: float  # computing them takes no longer

    @property
    def stop(self) -> int:
        return self.start + len(self.blocks)


class Transfer(Struct, eq=False):
    """The moves that one request waits for: the blocks it was given are saved, then its own are brought, in order."""

    saves: Sequence[Save]
    loads: Sequence[Load]
    pull: Pull | None = None  # after the loads
    came: int = 0  # leading loads that have been carried out and verified
    pulled: int = 0  # leading blocks of the pull, likewise
    lost: list[int] = field(default_factory=list)  # slots whose KV is wrong

    @property
    def blocks(self) -> list[int]:
        return [*(load.block for load in self.loads), *(self.pull.blocks if self.pull is not None else ())]
