"""A trace as flat arrays, with an element for each full block of a prompt.

Block numbers become dense, in order of first appearance. A number names its block and all that is before it.
"""

from collections import defaultdict
from itertools import chain, count
from typing import TypeAlias

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from lab.trace.requests import Trace

Integers: TypeAlias = NDArray[np.int64]
NOTHING = -1  # instead of an earlier access, request or block


class Accesses(Struct, frozen=True, eq=False):
    """Requests in order; `numbers` of one after the other. `findable`: how many of each request's a cache may answer.

    At least a prompt's last token is always computed, so of a prompt that ends where a block ends the last block is.
    """

    block_tokens: int
    numbers: Integers
    lengths: Integers  # full blocks of each request
    input_tokens: Integers
    unique: int

    @property
    def findable(self) -> Integers:
        found: Integers = (self.input_tokens - 1) // self.block_tokens
        return found

    @property
    def ends(self) -> Integers:
        return np.cumsum(self.lengths)

    @property
    def requests(self) -> Integers:
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    @property
    def depths(self) -> Integers:
        starts = self.ends - self.lengths
        return np.arange(len(self.numbers)) - np.repeat(starts, self.lengths)

    @property
    def tokens(self) -> int:
        return int(self.input_tokens.sum())


def accesses_of(trace: Trace) -> Accesses:
    size = trace.block_tokens
    input_tokens = np.array([request.input_tokens for request in trace.requests], np.int64)
    full = [request.blocks[: request.input_tokens // size] for request in trace.requests]
    lengths = np.fromiter(map(len, full), np.int64, len(full))
    known: defaultdict[int, int] = defaultdict(count().__next__)  # a table: no array holds keys of 64 bits and more
    numbers = np.fromiter(map(known.__getitem__, chain.from_iterable(full)), np.int64, int(lengths.sum()))
    return Accesses(size, numbers, lengths, input_tokens, len(known))


def earlier_of(numbers: Integers) -> Integers:
    """Return the previous access of the same block for each access, or NOTHING."""
    order = np.argsort(numbers, kind="stable")
    again = numbers[order[1:]] == numbers[order[:-1]]
    earlier = np.full(len(numbers), NOTHING, np.int64)
    earlier[order[1:][again]] = order[:-1][again]
    return earlier


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
    longest_blocks: int  # the most that a prompt takes, the last one counted if it is only begun
    shared_prefix_tokens: float  # a request's, on the average
    sharing_requests: int  # those that find anything


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
