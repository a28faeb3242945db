"""The cache hit that is predicted for a prompt, where the replica's events allow it."""

from collections.abc import Mapping

from msgspec import Struct

from router.placement.approximate import APPROXIMATE
from router.placement.decision import Decision
from router.placement.index import Matches
from router.placement.prompt import Prompt


class Prediction(Struct, frozen=True, gc=False):
    """The leading blocks of a prompt that the chosen replica should find in its cache."""

    block_size: int
    blocks: int
    claimed_blocks: int  # by its events alone
    sure: bool  # it rests on events alone, and on blocks that need not be brought
    alone: bool = True  # no request of ours is under way there, which may store and evict blocks meanwhile
    pulls: bool = False  # the replica may read more from neighbours
    brought_blocks: int = 0  # of the claimed ones: they may not come in time

    @property
    def tokens(self) -> int:
        return self.blocks * self.block_size


def predict(prompt: Prompt, decision: Decision, block_size: int, matches: Mapping[int, Matches]) -> Prediction | None:
    """Predict the hit at the chosen replica; None: only guessed.

    Nobody claims what it may read from neighbours, or what it would rather compute than bring.
    """
    chosen = decision.chosen
    if chosen is None or block_size == APPROXIMATE or not prompt.exact:
        return None
    found, slot = matches[block_size], chosen.slot
    most = (prompt.tokens - 1) // block_size  # the last token is always computed
    levels = [level for source, level in found.below if source in decision.own_sources()]
    held = (found.lower, found.gpu, found.sure, *levels)
    lower, gpu, sure, *reached = (min(blocks.get(slot, 0), most) for blocks in held)
    blocks = max(gpu, *reached, 0)
    # Nobody has claimed blocks that are still on their way; only lower media can reach beyond them.
    claimed = blocks if blocks > gpu else sure
    pulls = bool(decision.neighbours)
    is_sure, alone = lower == blocks == sure and not pulls, not chosen.all_in_flight
    return Prediction(block_size, blocks, claimed, is_sure, alone, pulls, claimed - sure)
