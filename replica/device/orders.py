"""Steps as orders: all that a device, or each rank of a model on several, has to be told to compute one.

They name no requests, and hold numbers of the host only.
"""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct

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
    adapters: int = 0  # loaded at a time, where graphs are to compute with them

    def counts(self, size: Size) -> Counts:
        return Counts(size.rows, min(size.rows, self.requests))


class Order(Struct, tag=True, array_like=True):
    """Update the block tables, do the copies, then compute the rows; sequences that decode come first."""

    counts: Counts
    inputs: memoryview  # `inputs.packed`
    news: memoryview  # `block_tables.BlockTables.news`
    copies: Sequence[Copy]
    size: Size | None  # of the graph to replay
    # For steps without one:
    decoding: int = 0  # sequences
    longest_prefill: int = 0  # rows of a sequence that does not
    longest: int = 0  # tokens of a sequence, with what is cached
    adapters: Sequence[tuple[str | None, int]] = ()  # by sequence, and its rows; empty: none has one


class Capture(Struct, tag=True, array_like=True):
    """Capture the graph of this size; larger ones have come before. The inputs are padding only."""

    size: Size
    inputs: memoryview
