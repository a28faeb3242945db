"""Steps as orders: all that a device, or each rank of a model on several, has to be told to compute one.

They name no requests, and hold numbers of the host only.
"""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct

from kernels.adapters import most_tiles
from kernels.spans import Copy
from replica.device.inputs import Counts


class Size(NamedTuple):
    """The size of a graph: rows of decoding sequences, one each, or of any."""

    mixed: bool
    rows: int
    adapted: bool = False  # with adapters, which need more work, in any row


class Limits(NamedTuple):
    """`rows` tokens of `requests` requests in a step, each of at most `tokens` in all."""

    rows: int
    requests: int
    tokens: int
    adapters: int = 0  # loaded at a time

    @property
    def largest(self) -> Counts:
        return self._counts(self.rows, adapted=self.adapters > 0)

    def counts(self, size: Size) -> Counts:
        return self._counts(size.rows, adapted=size.adapted)

    def _counts(self, rows: int, *, adapted: bool) -> Counts:
        return Counts(rows, min(rows, self.requests), most_tiles(rows, self.adapters) if adapted else 0)


class Order(Struct, tag=True, array_like=True):
    """Update the block tables, do the copies, then compute the rows; sequences that decode come first."""

    counts: Counts
    inputs: memoryview  # `inputs.packed`
    news: memoryview  # `block_tables.BlockTables.news`
    copies: Sequence[Copy]
    size: Size | None  # of the graph to replay
    adapters: Sequence[str]  # each takes a slot now, in this order, if it has none
    # For steps without one:
    decoding: int = 0  # sequences
    longest_prefill: int = 0  # rows of a sequence that does not
    longest: int = 0  # tokens of a sequence, with what is cached


class Capture(Struct, tag=True, array_like=True):
    """Capture the graph of this size; larger ones have come before. The inputs are padding only."""

    size: Size
    inputs: memoryview
