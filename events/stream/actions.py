"""The actions that a stream's state machine asks for."""

from typing import NamedTuple, TypeAlias

from events.cache.pool import Digest


class Apply(NamedTuple):
    """Apply this batch; `seq` is -1 for a batch of a snapshot."""

    seq: int
    payload: bytes


class Replay(NamedTuple):
    """Ask the replay socket for all batches from `start`; replies to an earlier request are void."""

    start: int


class Snapshot(NamedTuple):
    """Ask a native replica for its whole cache."""


class Reset(NamedTuple):
    """Forget the cache: the following events start from an empty one."""

    reason: str


class Partial(NamedTuple):
    """Events were lost for good: the cache as known may differ from the replica's.

    Unless a snapshot repairs that, forget what may be gone (`Stream.must_forget`).
    """

    reason: str


class Gap(NamedTuple):
    """Batches first to last are missing and are being repaired; for the reader of a log."""

    first: int
    last: int


class Compare(NamedTuple):
    """The replica's digest at exactly this point of the stream; answer with `matched` or `mismatch`."""

    digest: Digest


Action: TypeAlias = Apply | Replay | Snapshot | Reset | Partial | Gap | Compare
