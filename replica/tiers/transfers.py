"""The requests that wait for blocks from lower media or neighbours, and the moves that the next step needs.

A request that has blocks to bring is admitted, but not scheduled: a mover brings them while others compute. What did
not come, because a medium or a neighbour failed, it computes like any other token.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

from replica.cache.block_pool import BlockPool
from replica.cache.moves import PULLED, Pull, Save, Transfer
from replica.cache.names import Match
from replica.runners.request import Request

LEAST_PULLED_BLOCKS = 4  # fewer are not worth asking for
LEAST_PATIENCE_S, MAX_PATIENCE_S = 0.5, 30.0


class Judgement(NamedTuple):
    """The speeds that are known, as answers to two questions."""

    pays_off: Callable[[str], bool]  # whether tokens are sooner brought from this medium than computed
    compute_s: Callable[[int], float]  # how long this many tokens take to compute; 0: not known


UNKNOWN = Judgement(lambda _: True, lambda _: 0.0)


class Found(NamedTuple):
    """Blocks after a request's hits: slots that are held, and then a neighbour's up to `stop`."""

    slots: Sequence[int]
    endpoint: str = ""
    stop: int = 0

    def __bool__(self) -> bool:
        return bool(self.slots or self.endpoint)


class Loading(NamedTuple):
    """A request and its transfer; the first `hits` of its blocks need none."""

    request: Request
    transfer: Transfer
    hits: int


class Transfers:
    def __init__(self, pool: BlockPool, judgement: Judgement) -> None:
        self._pool = pool
        self._judgement = judgement
        self._loading: dict[int, Loading] = {}  # loads by the transfer's id
        self._saves: list[Save] = []
        self._begun: list[Transfer] = []
        self.cancelled = 0  # requests that have gone while blocks come
        self.loaded_tokens: dict[str, int] = {}  # loaded tokens by medium

    # ---- a request begins to wait

    def look(self, request: Request, match: Match) -> Found:
        """Find what is sooner brought than computed; slots are held, so that they stay what they are."""
        lower = self._pool.lower
        if request.computes_whole_prompt:
            return Found(())
        slots: list[int] = []
        if lower is not None and match.lower:
            pays_off = {tier.medium: self._judgement.pays_off(tier.medium) for tier in lower.tiers}
            slots = list(takewhile(lambda slot: pays_off[lower.medium(slot)], match.lower))
            lower.hold(slots)
        found = Found(slots)
        if request.sources:
            # Ask the neighbour that should have most of the prompt, if it has enough more.
            size, full = self._pool.block_size, (len(request.chain) - 1) // self._pool.block_size
            source = max(request.sources, key=lambda one: one.tokens)
            stop = min(source.tokens // size, full)
            is_more = stop - len(match.blocks) - len(slots) >= LEAST_PULLED_BLOCKS
            if is_more and self._pool.caching and self._judgement.pays_off(PULLED):
                found = Found(slots, source.endpoint, stop)
        if found:
            self.taken()  # earlier saves are not the business of this request's transfer
        return found

    def abandon(self, found: Found) -> None:
        """There was no room: end the holds."""
        if found.slots:
            assert self._pool.lower is not None
            self._pool.lower.release(found.slots, loaded=False)

    def taken(self) -> None:
        """Note that blocks were taken for computing: what they had is saved before the next step."""
        if self._pool.lower is not None:
            self._saves += self._pool.lower.take_saves()

    def begin(self, request: Request, hits: int, found: Found) -> None:
        """Let the request, which has just taken blocks, wait until those after its hits are filled."""
        lower, here = self._pool.lower, hits + len(found.slots)
        loads = [] if lower is None else lower.loads(found.slots, request.blocks[hits:here])
        transfer = Transfer([] if lower is None else lower.take_saves(), loads)
        if found.endpoint:
            blocks = request.blocks[here : found.stop]
            compute_s = self._judgement.compute_s(len(blocks) * self._pool.block_size)
            patience_s = min(MAX_PATIENCE_S, max(LEAST_PATIENCE_S, compute_s or MAX_PATIENCE_S))
            transfer.pull = Pull(found.endpoint, request.chain, here, blocks, patience_s)
            request.sources = [one for one in request.sources if one.endpoint != found.endpoint]
        self._loading[id(transfer)] = Loading(request, transfer, hits)
        self._begun.append(transfer)
        request.is_loading = True
        request.uncached_tokens = len(request.chain) - max(here, found.stop) * self._pool.block_size

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
        request, _, hits = self._loading.pop(id(transfer))
        request.is_loading = False
        for load in transfer.loads[: transfer.came]:
            self._count(load.medium)
        self._count(PULLED, transfer.pulled)
        came = hits + transfer.came + transfer.pulled
        pool.store(request.chain, request.blocks, came)
        request.computed = request.launched = came * pool.block_size
        if lower is not None:
            lower.drop(transfer.lost)
            lower.release([load.slot for load in transfer.loads], loaded=True)
        return request

    def _count(self, medium: str, blocks: int = 1) -> None:
        if blocks:
            self.loaded_tokens[medium] = self.loaded_tokens.get(medium, 0) + blocks * self._pool.block_size

    # ---- say

    def __len__(self) -> int:
        return len(self._loading)

    @property
    def requests(self) -> Iterator[Request]:
        return (loading.request for loading in self._loading.values())

    def tokens(self) -> int:
        return sum(len(loading.transfer.blocks) for loading in self._loading.values()) * self._pool.block_size
