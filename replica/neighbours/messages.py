"""Messages between two replicas. New fields go last, with defaults; nothing is renamed.

The reader connects to the source. All that follows the handshake (`replica.neighbours.sealed`) is a frame:
`u32 LE: length of the body | 32 bytes: its seal | the body as msgpack`.

    source                          reader
    MAGIC, nonce              ->
                              <-    MAGIC, nonce, proof
    Welcome                   ->                            its seal proves the source
                              <-    Read
    Offer                     ->
    Block, payload            ->                            as often as the offer says, in order

To a Read without tokens the answer is Prefixes.
"""

import struct
from collections.abc import Callable
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

from events.blocks import ExtraKey

MAGIC = b"wr-kv/1\n"
LENGTH = struct.Struct("<I")

LEASE_S = 20.0  # a stream's lease; a reader that gives way to steps of its own may need nearly as long
MAX_READ_BYTES = 16 * 1024 * 1024  # the limit for a request: four million tokens
MAX_ANSWER_BYTES = 1024 * 1024  # the limit for any other body; a block's tokens and extra keys are the longest
LONGEST_NAME = 512
MAX_BLOCKS = 2**24

Name: TypeAlias = Annotated[str, Meta(max_length=LONGEST_NAME)]
Index: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_BLOCKS)]


class Welcome(Struct, frozen=True, tag="welcome"):
    transports: dict[str, bytes] = {}  # always `tcp`; there were others


class Read(Struct, frozen=True, tag="read"):
    """Asks for a prompt's blocks from `start` to `stop`; without tokens, for the hottest prefixes, of `stop` blocks."""

    model: Name
    prompt: bytes  # the token ids of the blocks up to `stop`, packed as little-endian uint32
    start: Index
    stop: Index
    kv_layout: Name
    lora_name: Name | None = None
    cache_salt: Name | None = None
    extras: dict[int, list[ExtraKey]] = {}
    patience_s: Annotated[float, Meta(ge=0.0, le=3600.0)] = 0.0  # afterwards the reader is gone
    lora_digest: Name = ""  # the digest of the adapter's files


class Offer(Struct, frozen=True, tag="offer"):
    """Says how many blocks follow. Without any, `reason` may say why."""

    blocks: Index
    reason: Name = ""  # `layout`, `model`, `busy`, `invalid`; empty: the cache has no more


class Block(Struct, frozen=True, tag="block"):
    """One block, whose payload follows."""

    index: Index
    tokens: bytes  # packed
    exact: bytes | None  # its extra keys, as `Chain.exact` has them
    checksum: bytes  # xxh3_128 of the payload
    size: int  # the payload's size


class Prefixes(Struct, frozen=True, tag="prefixes"):
    reads: list[Read]  # each from its first block on


FromSource: TypeAlias = Welcome | Offer | Block | Prefixes

encode: Callable[[Read | FromSource], bytes] = msgspec.msgpack.Encoder().encode
decode_read: Callable[[bytes | memoryview], Read] = msgspec.msgpack.Decoder(Read).decode
decode_from_source: Callable[[bytes | memoryview], FromSource] = msgspec.msgpack.Decoder(FromSource).decode


class Lost(Exception):
    """The end of an exchange: the connection is of no more use; `reason` is a word for metrics."""

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(message or reason)
        self.reason = reason
