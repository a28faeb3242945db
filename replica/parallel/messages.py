"""Messages between the engine's process, which is rank 0, and its followers. Both are of the same version.

engine                        follower
Start            ->                         load your share of the model
                 <-           Ready         or Failed, and it ends
Compute, Logits  ->                         take part in the collectives of this computation
ReadAdapter      ->                         begin to read an adapter
                 <-           AdapterRead   whenever that is done
AddAdapter       ->                         from now on there is this adapter
DropAdapter      ->                         there is no such adapter any more, and none is to be read
"""

from collections.abc import Sequence
from typing import TypeAlias

import msgspec
from msgspec import Struct

from kernels.spans import Copy, Span
from replica.config import EngineConfig


class Start(Struct, tag=True, array_like=True):
    config: EngineConfig  # num_blocks is set
    rank: int
    # Descriptors that the follower has inherited
    kv: int
    exchange: int  # the memory of collectives
    peers: Sequence[int]  # sockets to the other ranks, in their order


class Compute(Struct, tag=True, array_like=True):
    """Do the copies, then compute the layers for these tokens."""

    token_ids: bytes  # int64
    spans: Sequence[Span]
    copies: Sequence[Copy]
    adapters: Sequence[str | None]  # one of each span


class Logits(Struct, tag=True, array_like=True):
    """Compute the logits of so many rows, which the engine broadcasts."""

    rows: int


class ReadAdapter(Struct, tag=True, array_like=True):
    number: int
    name: str
    folder: str


class AdapterRead(Struct, tag=True, array_like=True):
    number: int
    digest: str = ""
    failure: str = ""  # why it could not be read


class AddAdapter(Struct, tag=True, array_like=True):
    name: str  # the name of one that has been read


class DropAdapter(Struct, tag=True, array_like=True):
    name: str


class Ready(Struct, tag=True, array_like=True):
    adapters: dict[str, str] = {}  # adapters that were named at the start, and the digests of their files


class Failed(Struct, tag=True, array_like=True):
    message: str


OfAdapters: TypeAlias = ReadAdapter | AddAdapter | DropAdapter
ToFollower: TypeAlias = Start | Compute | Logits | OfAdapters

encode = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(ToFollower).decode
decode_answer = msgspec.msgpack.Decoder(Ready | Failed).decode
decode_read = msgspec.msgpack.Decoder(AdapterRead).decode
