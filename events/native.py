"""Messages of our own replicas and mirrors, on sockets of their own: status and snapshot (docs/wire.md).

Status socket (PUB): `[topic, Status as msgpack]`; SGLang's load: `[b"load", number, LoadStat as msgpack]`.
Snapshot socket (ROUTER): a DEALER sends `[b"", b"snapshot"]`; the answer is `[b"", SnapshotHeader]`, then as many
`[b"", event batch]` as the header says. New fields go last, with defaults; nothing is renamed.
"""

from collections.abc import Callable
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

SNAPSHOT_REQUEST = b"snapshot"
LOAD_TOPIC = b"load"
NO_INCARNATION = -1

MAX_SNAPSHOT_BATCHES = 65_536
# A status with a figure that no engine can have is not read at all: the router computes with these.
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**40)]
Rate: TypeAlias = Annotated[float, Meta(ge=0.0, le=1e8)]
Rates: TypeAlias = Annotated[dict[Annotated[str, Meta(max_length=16)], Rate], Meta(max_length=8)]


class Load(Struct, frozen=True, omit_defaults=True):
    """The engine's load; counted by it, carried by Status."""

    running: Count = 0
    waiting: Count = 0
    queued_prefill_tokens: Count = 0
    free_blocks: Count = 0
    cached_blocks: Count = 0
    prefill_tokens_per_s: Rate = 0.0
    load_tokens_per_s: Rates = {}  # blocks brought back, by source: CPU, STORAGE, or PULL from a neighbour
    loading_tokens: Count = 0  # tokens of admitted requests that are being brought back or wait for it
    host_blocks: Count = 0  # the size of host memory behind the cache
    answer_delay_s: Rate = 0.0  # one more running answer delays another one by this, in all its length


class Doubt(Struct, frozen=True, omit_defaults=True):
    """Why a mirror is not sure of what it holds; empty: it is sure."""

    reason: str = ""
    provable: bool = False  # a reader need not share it once the known blocks fill the engine's pool


SURE = Doubt()


class Status(Struct, frozen=True):
    """Heartbeat, load, and proof: the digest is true at sequence number `seq` (-1: nothing sent yet)."""

    incarnation: int
    seq: Annotated[int, Meta(ge=-1, le=2**63 - 1)]
    ts: float
    digest_blocks: int
    digest_xor: int
    load: Load
    doubt: Doubt = SURE


class SnapshotHeader(Struct, frozen=True):
    incarnation: int
    seq: Annotated[int, Meta(ge=-1, le=2**63 - 1)]
    ts: float
    batches: Annotated[int, Meta(ge=0, le=MAX_SNAPSHOT_BATCHES)]
    model: str = ""  # the name that is part of the block keys
    doubt: Doubt = SURE


class LoadStat(Struct, array_like=True, tag=True, frozen=True):
    """The beginning of SGLang's (0.5.23): each rank sends it as it changes, and once a second."""

    num_running_reqs: Count
    num_waiting_reqs: Count


encode_native: Callable[[Status | SnapshotHeader], bytes] = msgspec.msgpack.Encoder().encode
decode_status: Callable[[bytes], Status] = msgspec.msgpack.Decoder(Status).decode
_decode_load: Callable[[bytes], LoadStat] = msgspec.msgpack.Decoder(LoadStat).decode
decode_snapshot_header: Callable[[bytes], SnapshotHeader] = msgspec.msgpack.Decoder(SnapshotHeader).decode


def read_status(frames: list[bytes]) -> Status:
    """A status; of SGLang's load one of `NO_INCARNATION`. Raise ValueError if it is none."""
    if frames[0] != LOAD_TOPIC or len(frames) != 3:
        return decode_status(frames[-1])
    told = _decode_load(frames[-1])
    return Status(NO_INCARNATION, -1, 0.0, 0, 0, Load(running=told.num_running_reqs, waiting=told.num_waiting_reqs))
