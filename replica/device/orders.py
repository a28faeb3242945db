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

A step is an order, on one device, too: all that has to be told to compute it. It names no requests, and holds numbers
of the host only.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import msgspec
from msgspec import Struct

from kernels.adapters import most_tiles
from kernels.spans import Copy
from replica.config import EngineConfig
from replica.device.accelerator import Span
from replica.device.inputs import Counts


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


class Meet(Struct, tag=True, array_like=True):
    file: str  # a file that is not there yet, in a folder of the engine's own


class Build(Struct, tag=True, array_like=True):
    blocks: int  # and one more, for padding


class Measure(Struct, tag=True, array_like=True):
    pass


class Measured(Struct, tag=True, array_like=True):
    span: Span


class Logits(Struct, tag=True, array_like=True):
    """Compute the logits of so many rows, which the engine broadcasts."""

    rows: int


class Ready(Struct, tag=True, array_like=True):
    adapters: dict[str, str] = {}  # adapters that were named at the start, and the digests of their files


class Failed(Struct, tag=True, array_like=True):
    message: str


ToFollower: TypeAlias = Load | Meet | Build | Order | Capture | Logits | Measure

encode = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(ToFollower).decode
decode_answer = msgspec.msgpack.Decoder(Ready | Failed).decode
decode_measured = msgspec.msgpack.Decoder(Measured | Failed).decode


# ---- sizes that graphs are captured for: a step takes the smallest one it fits in

# Those in which all decode are measured in requests, and those with prompts in rows. Where a step keeps the GPU busy
# for longer than the host takes to launch its kernels, no graph is needed, and rows that fill it up would cost time.
SMALLEST = (1, 2, 4, 8)
EVERY = 8  # up to EVEN, then twice as far apart
EVEN = 256
MIXED = (16, *range(32, 256, 32), *range(256, 512, 64), *range(512, 1024, 128), *range(1024, 2048, 256), 2048)
LEAST_MIXED, MAX_MIXED = 512, 2048  # rows of the largest
WORK = 5 * 10**10  # parameters of a layer times rows, for which a GPU takes as long as the host for a layer's launches
MIXED_PROMPTS = 8  # the most in a step: a graph's kernels look at all that it has room for


def decode_sizes(largest: int) -> tuple[int, ...]:
    sizes = (*SMALLEST, *range(2 * EVERY, EVEN + 1, EVERY), *range(EVEN + 2 * EVERY, largest, 2 * EVERY))
    return (*(size for size in sizes if size < largest), largest)


def mixed_sizes(rows: int, layer: int) -> tuple[int, ...]:
    """The sizes of steps with prompts, of at most so many rows, for a layer of so many parameters."""
    largest = min(rows, max(LEAST_MIXED, min(MAX_MIXED, WORK // layer)))
    return (*(size for size in MIXED if size < largest), largest)


def size_for(sizes: tuple[int, ...], wanted: int) -> int | None:
    """None: more than the largest."""
    place = bisect_left(sizes, wanted)
    return sizes[place] if place < len(sizes) else None
