"""The bytes of a disk file. Raise VERSION with any change: files of another version are never read.

    0                    head: one page
    page 1               group 0: the headers of GROUP_SLOTS records, then their payloads, each from a new page
    page 1 + group       group 1: ...

A record is a header and a payload in one slot. Headers lie together, so recovery reads a few long stretches instead of
one page for each record. A file keeps its records when it grows or shrinks, because groups have a fixed size.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from msgspec import msgpack
from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from events.blocks import TOKEN_BYTES

VERSION = 1
MAGIC = b"WARMKV\r\n"
PAGE = 4096  # O_DIRECT moves whole pages on any common disk
GROUP_SLOTS = 256
SECTOR = 512
LEAST_EXACT_BYTES = 256  # a header has room for this many extra keys, or a few more
NO_EXACT = -1
MAX_IDENTITY = 2**62  # a file may claim anything; beyond this there would be no room for new identities

_CHECKSUM = struct.Struct("<Q")
_HEAD = struct.Struct("<8sIIQQ16s")  # magic, version, block size, payload bytes, generation, fingerprint
_HEADER = struct.Struct("<Qqq16si")  # key, identity, parent, digest of the payload, bytes of extra keys; then tokens
_FIXED_BYTES = _CHECKSUM.size + _HEADER.size


class Record(NamedTuple):
    """A block's name and content, as `replica.cache.contents` knows it."""

    key: int
    identity: int
    parent: int  # the identity before it; 0: the root
    tokens: bytes
    exact: bytes | None = None  # the rest that its KV depends on besides tokens, and that its events say, packed


class Header(NamedTuple):
    record: Record
    digest: bytes  # xxh3_128 of the payload


def file_fingerprint(kv_layout: str, block_size: int, payload_bytes: int) -> bytes:
    """Name files that this version can read and whose blocks have this meaning and size."""
    return bytes.fromhex(xxh3_128_hexdigest(msgpack.encode((VERSION, kv_layout, block_size, payload_bytes))))


class FileLayout:
    """Offsets in a file whose blocks have this many tokens and bytes, and its head and headers as bytes."""

    def __init__(self, block_size: int, payload_bytes: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; it must be at least 1")
        if payload_bytes < 1:
            raise ValueError(f"payload_bytes is {payload_bytes}; it must be at least 1")
        self.block_size = block_size
        self.payload_bytes = payload_bytes
        self.token_bytes = block_size * TOKEN_BYTES
        self.header_bytes = _round_up(_FIXED_BYTES + self.token_bytes + LEAST_EXACT_BYTES, SECTOR)
        self.most_exact_bytes = self.header_bytes - _FIXED_BYTES - self.token_bytes
        self.stride = _round_up(payload_bytes, PAGE)
        self.table_bytes = _round_up(GROUP_SLOTS * self.header_bytes, PAGE)
        self.group_bytes = self.table_bytes + GROUP_SLOTS * self.stride

    # ---- places

    def table_offset(self, group: int) -> int:
        return PAGE + group * self.group_bytes

    def header_offset(self, slot: int) -> int:
        group, index = divmod(slot, GROUP_SLOTS)
        return self.table_offset(group) + index * self.header_bytes

    def payload_offset(self, slot: int) -> int:
        group, index = divmod(slot, GROUP_SLOTS)
        return self.table_offset(group) + self.table_bytes + index * self.stride

    def file_bytes(self, num_slots: int) -> int:
        return self.payload_offset(num_slots - 1) + self.stride

    # ---- bytes

    def encode_head(self, fingerprint: bytes, generation: int) -> bytes:
        """One page. The generation seeds the checksum of every header: those of another generation are not valid."""
        text = _HEAD.pack(MAGIC, VERSION, self.block_size, self.payload_bytes, generation, fingerprint)
        return (text + _CHECKSUM.pack(xxh3_64_intdigest(text))).ljust(PAGE, b"\0")

    def generation_in(self, page: bytes, fingerprint: bytes) -> int | None:
        """None for a head that is torn, or of another version, geometry or fingerprint."""
        if len(page) < _HEAD.size + _CHECKSUM.size:
            return None
        generation: int = _HEAD.unpack_from(page)[4]
        head = self.encode_head(fingerprint, generation)[: _HEAD.size + _CHECKSUM.size]
        return generation if page.startswith(head) else None

    def encode_header(self, header: Header, generation: int) -> bytes:
        """ValueError for a record that does not fit."""
        key, identity, parent, tokens, exact = header.record
        if len(tokens) != self.token_bytes:
            raise ValueError(f"tokens have {len(tokens)} bytes; a block of {self.block_size} has {self.token_bytes}")
        if exact is not None and len(exact) > self.most_exact_bytes:
            raise ValueError(f"extra keys have {len(exact)} bytes; a record has room for {self.most_exact_bytes}")
        exact_bytes = NO_EXACT if exact is None else len(exact)
        text = _HEADER.pack(key, identity, parent, header.digest, exact_bytes) + tokens + (exact or b"")
        text = text.ljust(self.header_bytes - _CHECKSUM.size, b"\0")
        return _CHECKSUM.pack(xxh3_64_intdigest(text, generation)) + text

    def decode_header(self, page: memoryview, generation: int) -> Header | None:
        """None for an empty slot, and for a header that is torn, foreign or makes no sense."""
        if len(page) != self.header_bytes:
            return None
        [checksum] = _CHECKSUM.unpack_from(page)
        if checksum != xxh3_64_intdigest(page[_CHECKSUM.size :], generation):
            return None
        key, identity, parent, digest, exact_bytes = _HEADER.unpack_from(page, _CHECKSUM.size)
        if not 0 <= parent < identity < MAX_IDENTITY or not NO_EXACT <= exact_bytes <= self.most_exact_bytes:
            return None
        start = _FIXED_BYTES + self.token_bytes
        tokens = bytes(page[_FIXED_BYTES:start])
        exact = None if exact_bytes == NO_EXACT else bytes(page[start : start + exact_bytes])
        return Header(Record(key, identity, parent, tokens, exact), digest)


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


class Recovered(NamedTuple):
    slot: int
    record: Record


class Recovery(NamedTuple):
    records: Sequence[Recovered]  # parents before their children
    last_identity: int  # give new identities above it


NOTHING = Recovery((), 0)


def findable(found: Iterable[Recovered]) -> Iterator[Recovered]:
    """Yield one record of each content, parents before their children.

    A lookup walks from the root, so nobody can ever find a record whose parent is missing: the parent's content would
    get a new identity. Such records are left out.
    """
    identities = {0}
    contents: set[tuple[int, bytes, bytes | None]] = set()
    for slot, record in sorted(found, key=lambda each: each.record.identity):  # a parent's identity is the lower one
        content = record.parent, record.tokens, record.exact
        if record.parent in identities and record.identity not in identities and content not in contents:
            identities.add(record.identity)
            contents.add(content)
            yield Recovered(slot, record)
