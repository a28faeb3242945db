"""Hit rate over cache size, and the size that a hit rate takes."""

import math

import numpy as np
from msgspec import Struct

from lab.analysis.accesses import Accesses, Integers
from lab.analysis.distances import hits_by_capacity

HEADROOM = 0.2  # for requests that run, and for tomorrow


class HitRateCurve(Struct, frozen=True, eq=False):
    """`hits[c]`: blocks found where c of them are kept; `input_tokens` of all prompts.

    A cache has one block more than it keeps while a prompt is computed whose end fills none: `begun_blocks`.
    """

    block_tokens: int
    input_tokens: int
    hits: Integers
    begun_blocks: int

    @property
    def most_blocks(self) -> int:
        """The cache size in blocks that needs no eviction."""
        return len(self.hits) - 1 + self.begun_blocks

    def hit_rate(self, blocks: int) -> float:
        """The token hit rate of a cache of this many blocks."""
        return self._found(blocks) * self.block_tokens / self.input_tokens

    def share(self, blocks: int) -> float:
        """Tokens found, as a share of an unlimited cache's."""
        most = int(self.hits[-1])
        return self._found(blocks) / most if most else 1.0

    def _found(self, blocks: int) -> int:
        kept = max(0, min(blocks, self.most_blocks) - self.begun_blocks)
        return int(self.hits[kept])

    @property
    def best(self) -> float:
        return self.hit_rate(self.most_blocks)

    def needed(self, share: float) -> int:
        """The fewest blocks that give this share of all possible hits."""
        wanted = math.ceil(share * int(self.hits[-1]) - 1e-6)
        return int(np.searchsorted(self.hits, wanted)) + self.begun_blocks


def curve_of(accesses: Accesses) -> HitRateCurve:
    begun = bool((accesses.input_tokens % accesses.block_tokens).any())
    return HitRateCurve(accesses.block_tokens, accesses.tokens, hits_by_capacity(accesses), int(begun))


def with_headroom(blocks: int) -> int:
    return math.ceil(blocks * (1 + HEADROOM) - 1e-6)
