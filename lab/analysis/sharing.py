"""How much of the prompts is shared if nothing is ever evicted."""

from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct

from lab.analysis.accesses import NOTHING, Accesses, earlier_of

FACTORS = (1, 2, 4, 8, 16)


class Sharing(Struct, frozen=True):
    """Blocks are full ones. `shared_blocks` are used by two or more, `reusable_blocks` is every further use."""

    requests: int
    input_tokens: int
    block_tokens: int
    blocks: int
    unique_blocks: int
    shared_blocks: int
    reusable_blocks: int
    saved_tokens: int
    hit_rate: float
    longest_blocks: int  # that a prompt takes, the last one counted if it is only begun
    shared_prefix_tokens: float  # a request's, on the average
    sharing_requests: int  # those that find anything


class Coarser(Struct, frozen=True):
    """The hit rate with blocks `factor` times as large."""

    factor: int
    block_tokens: int
    hit_rate: float


def sharing_of(accesses: Accesses) -> Sharing:
    uses = np.bincount(accesses.numbers, minlength=accesses.unique)
    is_again = earlier_of(accesses.numbers) != NOTHING
    is_again &= accesses.depths < np.repeat(accesses.findable, accesses.lengths)
    found = np.bincount(accesses.requests[is_again], minlength=len(accesses.lengths))  # blocks that an earlier one had
    saved_tokens = int(found.sum()) * accesses.block_tokens
    requests = len(accesses.lengths)
    return Sharing(
        requests=requests,
        input_tokens=accesses.tokens,
        block_tokens=accesses.block_tokens,
        blocks=len(accesses.numbers),
        unique_blocks=accesses.unique,
        shared_blocks=int(np.count_nonzero(uses > 1)),
        reusable_blocks=len(accesses.numbers) - accesses.unique,
        saved_tokens=saved_tokens,
        hit_rate=saved_tokens / accesses.tokens,
        longest_blocks=int(-(-accesses.input_tokens.max() // accesses.block_tokens)),
        shared_prefix_tokens=saved_tokens / requests,
        sharing_requests=int(np.count_nonzero(found)),
    )


def coarser(accesses: Accesses, factors: Sequence[int] = FACTORS) -> Iterator[Coarser]:
    """Yield hit rates with larger blocks: one is shared if its last part is, which names everything before it."""
    is_again = earlier_of(accesses.numbers) != NOTHING
    ends = accesses.depths + 1
    for factor in factors:
        size = accesses.block_tokens * factor
        findable = np.repeat((accesses.input_tokens - 1) // size, accesses.lengths)
        hits = np.count_nonzero(is_again & (ends % factor == 0) & (ends // factor <= findable))
        yield Coarser(factor, size, int(hits) * size / accesses.tokens)
