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
"""

from typing import TypeAlias

import msgspec
from msgspec import Struct

from replica.config import EngineConfig
from replica.device.accelerator import Span
from replica.device.orders import Capture, Order
from replica.device.ranks_memory import End
from replica.parallel.messages import Failed, Logits, OfAdapters


class Load(Struct, tag=True, array_like=True):
    config: EngineConfig
    rank: int
    reads: End
    writes: End


class Meet(Struct, tag=True, array_like=True):
    file: str  # that is not there yet, in a folder of the engine's own


class Build(Struct, tag=True, array_like=True):
    blocks: int  # and one more, for padding


class Measure(Struct, tag=True, array_like=True):
    pass


class Measured(Struct, tag=True, array_like=True):
    span: Span


ToFollower: TypeAlias = Load | Meet | Build | Order | Capture | Logits | Measure | OfAdapters

decode_order = msgspec.msgpack.Decoder(ToFollower).decode
decode_measured = msgspec.msgpack.Decoder(Measured | Failed).decode
