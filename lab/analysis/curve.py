"""Hit rate over cache size, and the size that a hit rate takes: exactly, for all sizes of an LRU cache at once.

A request gives its blocks back tail first, so they stand in the cache's order with the first as the most recent, and
a block is always at least as recent as those that come after it. So the blocks of a request that were last used by the
same earlier one lie next to each other in the cache's order: they move together, as a segment. The place of the first
is how many blocks have been used since that request; the others follow it. A block is used since request q when an
access after q finds it last used in q or before, so that

    place = blocks of segments so far whose earlier request is q or before - blocks of all requests up to q

and the first term is a sum over smaller elements to the left, for which `smaller_before` needs log n passes.
"""

import math
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from lab.analysis.accesses import NOTHING, Accesses, Integers, earlier_of


class Segments(NamedTuple):
    """Consecutive blocks of a request that were last used by the same earlier request, or never (NOTHING)."""

    requests: Integers
    earlier: Integers
    depths: Integers  # the depths of the first block
    lengths: Integers


def hits_by_capacity(accesses: Accesses) -> Integers:
    """Element c: how many accesses hit in a cache of c blocks; the last is what a cache without an end gives."""
    segments = segments_of(accesses)
    above = smaller_before(segments.earlier, segments.lengths)
    is_known = segments.earlier != NOTHING
    places = above[is_known] - accesses.ends[segments.earlier[is_known]]
    room = accesses.findable[segments.requests] - segments.depths
    counted = np.clip(np.minimum(segments.lengths, room), 0, None)[is_known]
    size = accesses.unique + 2
    begun = np.bincount(places + 1, minlength=size)
    ended = np.bincount(places + 1 + counted, minlength=size)
    hits: Integers = np.cumsum(np.cumsum(begun - ended))[: accesses.unique + 1]
    return hits


def segments_of(accesses: Accesses) -> Segments:
    requests = accesses.requests
    earlier = earlier_of(accesses.numbers)
    by = np.where(earlier == NOTHING, NOTHING, requests[earlier])
    is_first = np.ones(len(by), np.bool_)
    is_first[1:] = (by[1:] != by[:-1]) | (requests[1:] != requests[:-1])
    starts = np.flatnonzero(is_first)
    lengths = np.diff(starts, append=len(by))
    return Segments(requests[starts], by[starts], accesses.depths[starts], lengths)


def smaller_before(values: Integers, weights: Integers) -> Integers:
    """For each element, sum the weights of those to its left that are not greater.

    As in a radix sort from the highest bit of the ranks: elements stand in groups with equal higher bits, in their
    first order; those whose bit is set have all of their group before them whose bit is not set to count.
    """
    size = len(values)
    ranks = np.empty(size, np.int64)
    ranks[np.argsort(values, kind="stable")] = np.arange(size)
    first_ranks = ranks
    totals = np.zeros(size, np.int64)
    for bit in reversed(range((size - 1).bit_length() if size else 0)):
        is_high = (ranks >> bit & 1).astype(np.bool_)
        starts = ranks >> (bit + 1) << (bit + 1)
        below = _sums(np.where(is_high, 0, weights))
        totals[ranks[is_high]] += (below[:-1] - below[starts])[is_high]
        # Each group has the elements whose bit is not set first, and otherwise is as it was.
        lows = _sums((~is_high).astype(np.int64))
        lows_before = lows[:-1] - lows[starts]
        to = np.where(is_high, (1 << bit) + np.arange(size) - lows_before, starts + lows_before)
        moved, weighed = np.empty_like(ranks), np.empty_like(weights)
        moved[to], weighed[to] = ranks, weights
        ranks, weights = moved, weighed
    return totals[first_ranks]


def _sums(values: Integers) -> Integers:
    """Before each element, and at the end."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(values)))


HEADROOM = 0.2  # room for requests that run, and for tomorrow


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
        return self._found(blocks) * self.block_tokens / self.input_tokens

    def share(self, blocks: int) -> float:
        most = int(self.hits[-1])
        return self._found(blocks) / most if most else 1.0

    def _found(self, blocks: int) -> int:
        kept = max(0, min(blocks, self.most_blocks) - self.begun_blocks)
        return int(self.hits[kept])

    def needed(self, share: float) -> int:
        """The fewest blocks that give this share of all possible hits."""
        wanted = math.ceil(share * int(self.hits[-1]) - 1e-6)
        return int(np.searchsorted(self.hits, wanted)) + self.begun_blocks


def curve_of(accesses: Accesses) -> HitRateCurve:
    begun = bool((accesses.input_tokens % accesses.block_tokens).any())
    return HitRateCurve(accesses.block_tokens, accesses.tokens, hits_by_capacity(accesses), int(begun))


def with_headroom(blocks: int) -> int:
    return math.ceil(blocks * (1 + HEADROOM) - 1e-6)
