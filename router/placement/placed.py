"""A request at its replica."""

from collections.abc import Sequence

from msgspec import Struct

from router.placement.cost import Tenant
from router.placement.load import ReplicaLoad


class Placed(Struct, eq=False, gc=False):
    """A request at a replica, from when it is sent until it has ended."""

    id: int
    load: ReplicaLoad
    sent_s: float
    uncached_tokens: int = 1
    streams: bool = True  # its first byte says that its prefill is done
    priority_s: float | None = None  # it is computed as if it had been sent so much later; None: in the replica's order
    awaited_s: float = 0.0  # how long its blocks count as stored without an event
    awaited: tuple[list[int], int] | None = None  # these blocks, and the number to withdraw them by if it never begins
    pages: Sequence[int] = ()  # that count as cached, likewise
    fetched_tokens: int = 0  # whose KV comes from another replica
    is_ours: bool = True  # False: a peer has sent it
    tenant: Tenant | None = None  # that it counts for
    stands_back: bool = False  # who overtakes it harms nobody, as its tenant was given more than its share
    has_begun: bool = False
    is_batch: bool = False  # of several prompts: its first byte says that one of them is computed

    @property
    def awaited_keys(self) -> int:
        return 0 if self.awaited is None else len(self.awaited[0])
