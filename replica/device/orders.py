"""Messages between the engine's process, which has the first GPU, and its followers, which have one each.

engine                              follower
Load                   ->                         take your GPU
                       <-           Ready         or Failed, and it ends
Meet                   ->                         join the group, and load your share of the model
                       <-           Ready         or Failed, and it ends
Build                  ->                         take so many blocks of KV
                       <-           Ready         or Failed, and it ends
Capture, Order, Logits ->                         take part in their collectives
Measure                ->
                       <-           Measured
ReadAdapter, AddAdapter, DropAdapter               as in `replica.parallel.messages`

A step is an order, on one device, too: all that has to be told to compute it. It names no requests, and holds numbers
of the host only.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import msgspec
from msgspec import Struct

from kernels.adapters import most_tiles
from kernels.spans import Copy
from replica.config import EngineConfig
from replica.device.accelerator import Span
from replica.device.inputs import Counts
from replica.device.ranks_memory import End
from replica.parallel.messages import Failed, Logits, OfAdapters


class Size(NamedTuple):
    """The size of a graph: rows of decoding sequences, one each, or of any."""

    mixed: bool
    rows: int
    adapted: bool = False  # any row may have an adapter, which needs more work


class Limits(NamedTuple):
    """`rows` tokens of `requests` requests in a step, each of at most `tokens` in all."""

    rows: int
    requests: int
    tokens: int
    adapters: int = 0  # loaded at a time

    @property
    def largest(self) -> Counts:
        return self.counts(Size(True, self.rows, self.adapters > 0))

    def counts(self, size: Size) -> Counts:
        tiles = most_tiles(size.rows, self.adapters) if size.adapted else 0
        return Counts(size.rows, min(size.rows, self.requests), tiles)


class Order(Struct, tag=True, array_like=True):
    """Update the block tables, do the copies, then compute the rows; sequences that decode come first."""

    counts: Counts
    inputs: memoryview  # `inputs.packed`
    news: memoryview  # `block_tables.BlockTables.news`
    copies: Sequence[Copy]
    size: Size | None  # the size of the graph to replay
    adapters: Sequence[str]  # each takes a slot now, in this order, if it has none
    # Steps without one have these:
    decoding: int = 0  # sequences
    longest_prefill: int = 0  # rows of a sequence that does not
    longest: int = 0  # tokens of a sequence, with what is cached


class Capture(Struct, tag=True, array_like=True):
    """Capture the graph of this size; larger ones have come before. The inputs are padding only."""

    size: Size
    inputs: memoryview


class Load(Struct, tag=True, array_like=True):
    config: EngineConfig
    rank: int
    reads: End
    writes: End


class Meet(Struct, tag=True, array_like=True):
    file: str  # a file that is not there yet, in a folder of the engine's own


class Build(Struct, tag=True, array_like=True):
    blocks: int  # and one more, for padding


class Measure(Struct, tag=True, array_like=True):
    pass


class Measured(Struct, tag=True, array_like=True):
    span: Span


ToFollower: TypeAlias = Load | Meet | Build | Order | Capture | Logits | Measure | OfAdapters

decode_order = msgspec.msgpack.Decoder(ToFollower).decode
decode_measured = msgspec.msgpack.Decoder(Measured | Failed).decode
