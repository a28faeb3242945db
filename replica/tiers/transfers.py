"""The requests that wait for blocks from lower media, and the moves that the next step needs.

A request that has blocks to load is admitted, but not scheduled: a mover brings them while others compute. What did
not come, because a medium failed, it computes like any other token.
"""

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import NamedTuple, TypeAlias

from replica.block_pool import BlockPool, Match
from replica.request import Request
from replica.tiers.moves import Save, Transfer

# Whether tokens are sooner loaded from this medium than computed.
PaysOff: TypeAlias = Callable[[str], bool]


class Loading(NamedTuple):
    """A request and its transfer; the first `hits` of its blocks need none."""

    request: Request
    transfer: Transfer
    hits: int


class Transfers:
    def __init__(self, pool: BlockPool, pays_off: PaysOff) -> None:
        self._pool = pool
        self._pays_off = pays_off
        self._loading: dict[int, Loading] = {}  # by id of the transfer
        self._saves: list[Save] = []
        self._begun: list[Transfer] = []
        self.loaded_tokens: dict[str, int] = {}  # by medium

    # ---- a request begins to wait

    def worth_loading(self, match: Match) -> Sequence[int]:
        """The slots after the hits that are sooner loaded than computed; held, so that they stay what they are."""
        lower = self._pool.lower
        if lower is None or not match.lower:
            return ()
        pays_off = {tier.medium: self._pays_off(tier.medium) for tier in lower.tiers}
        slots = list(takewhile(lambda slot: pays_off[lower.medium(slot)], match.lower))
        lower.hold(slots)
        self.taken()  # what was saved before is not the business of this request's transfer
        return slots

    def abandon(self, slots: Sequence[int]) -> None:
        """There was no room: end the hold."""
        if slots:
            assert self._pool.lower is not None
            self._pool.lower.release(slots, loaded=False)

    def taken(self) -> None:
        """Note that blocks were taken for computing: what they had is saved before the next step."""
        if self._pool.lower is not None:
            self._saves += self._pool.lower.take_saves()

    def begin(self, request: Request, hits: int, slots: Sequence[int]) -> None:
        """Let the request, which has just taken blocks, wait until the slots are loaded into those after its hits."""
        assert self._pool.lower is not None
        lower = self._pool.lower
        loads = lower.loads(slots, request.blocks[hits : hits + len(slots)])
        transfer = Transfer(lower.take_saves(), loads)
        self._loading[id(transfer)] = Loading(request, transfer, hits)
        self._begun.append(transfer)
        request.is_loading = True

    # ---- moves

    def take_moves(self) -> tuple[list[Save], list[Transfer]]:
        """Return the saves to be done before the next step, and the transfers to begin after them."""
        self.taken()
        moves = self._saves, self._begun
        self._saves, self._begun = [], []
        return moves

    def land(self, transfer: Transfer) -> Request:
        """Name the blocks that have come; return the request, which waits no longer."""
        pool, lower = self._pool, self._pool.lower
        assert lower is not None
        request, _, hits = self._loading.pop(id(transfer))
        request.is_loading = False
        lower.drop(transfer.lost)
        for load in transfer.loads[: transfer.came]:
            self.loaded_tokens[load.medium] = self.loaded_tokens.get(load.medium, 0) + pool.block_size
        came = hits + transfer.came
        pool.store(request.chain, request.blocks, came)
        request.computed = request.launched = came * pool.block_size
        lower.release([load.slot for load in transfer.loads], loaded=True)
        return request

    # ---- say

    def __len__(self) -> int:
        return len(self._loading)

    @property
    def requests(self) -> list[Request]:
        return [loading.request for loading in self._loading.values()]

    def tokens(self) -> int:
        """Tokens that are being loaded."""
        return sum(len(loading.transfer.loads) for loading in self._loading.values()) * self._pool.block_size
