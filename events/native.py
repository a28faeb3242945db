"""What only our own replicas say, on sockets of their own: status and snapshot (docs/wire.md, "Native sockets").

Status socket (PUB): `[topic, Status as msgpack]`.
Snapshot socket (ROUTER): a DEALER sends `[b"", b"snapshot"]`; the answer is `[b"", SnapshotHeader]`, then as many
`[b"", event batch]` as the header says. New fields go last, with defaults; nothing is renamed.
"""

from collections.abc import Callable

import msgspec
from msgspec import Struct

SNAPSHOT_REQUEST = b"snapshot"


class Load(Struct, frozen=True, omit_defaults=True):
    """How busy the engine is; counted by it, carried by Status."""

    running: int = 0
    waiting: int = 0
    queued_prefill_tokens: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    prefill_tokens_per_s: float = 0.0


class Status(Struct, frozen=True):
    """Heartbeat, load, and proof: the digest is true at sequence number `seq` (-1: nothing sent yet)."""

    incarnation: int
    seq: int
    ts: float
    digest_blocks: int
    digest_xor: int
    load: Load


class SnapshotHeader(Struct, frozen=True):
    incarnation: int
    seq: int
    ts: float
    batches: int
    model: str = ""  # the name that is part of the block keys


encode_native: Callable[[Status | SnapshotHeader], bytes] = msgspec.msgpack.Encoder().encode
decode_status: Callable[[bytes], Status] = msgspec.msgpack.Decoder(Status).decode
decode_snapshot_header: Callable[[bytes], SnapshotHeader] = msgspec.msgpack.Decoder(SnapshotHeader).decode
