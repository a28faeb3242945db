"""The publisher's own copy of the replica's cache, from which snapshots and digests are made."""

import struct
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any, TypeAlias

from msgspec import Struct

from events.blocks import TOKEN_BYTES, pack_tokens
from events.cache.pool import Digest, digest_of, low64, pool_name
from events.messages import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    Hash,
    KnownEvent,
    encode_batch,
)

RUN_BLOCKS = 64
SNAPSHOT_BATCH_BLOCKS = 2048
SNAPSHOT_BATCH_TOKENS = 512 * 1024  # readers take messages of 8 MiB
MAX_CONTEXTS = 1024  # then sharing them begins anew: salts and adapters in them have any number of names
# The blocks of one event have these in common.
CONTEXT_FIELDS = (
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
    "ownership",
    "cache_salt",
)
_context_of = attrgetter(*CONTEXT_FIELDS)

# Plain tuples: a named one costs as much to make as everything else done for a block.
Context: TypeAlias = tuple[Any, ...]
# Parent hash, packed tokens, extra keys, context.
MirroredBlock: TypeAlias = tuple[Hash | None, bytes, list[object] | None, Context]


class MirrorPool(Struct):
    """The blocks of one medium and group, and the XOR of their hashes."""

    medium: str
    group: int
    blocks: dict[Hash, MirroredBlock] = {}
    xor: int = 0


class Mirror:
    """Every resident block. The engine announces first copies and last removals only, so a set is enough."""

    def __init__(self) -> None:
        self.pools: dict[tuple[str, int], MirrorPool] = {}
        self._pools: dict[tuple[str | None, int | None], MirrorPool] = {}  # the same, by what events call them
        self.words: list[BlockStored] = []  # readers learn the groups from these, which have no blocks
        self._contexts: dict[Context, Context] = {}
        self._context: Context = ()

    def digest(self) -> Digest:
        return digest_of((pool.medium, pool.group, len(pool.blocks), pool.xor) for pool in self.pools.values())

    def apply(self, events: Iterable[KnownEvent]) -> None:
        """ValueError or TypeError if an event cannot be mirrored; it has changed nothing then, those before it have."""
        for event in events:
            if isinstance(event, BlockStored):
                hashes, extras, parent = event.block_hashes, event.extra_keys, event.parent_block_hash
                blocks = len(hashes)
                if not blocks:  # it tells of a group alone
                    self.words.append(event)
                    continue
                unpaired = event.token_ids and len(event.token_ids) != event.block_size * blocks
                if unpaired or (extras and len(extras) != blocks):
                    raise ValueError(
                        f"{len(event.token_ids)} token ids, {blocks} hashes of blocks of {event.block_size}"
                    )
                if event.mm_keys or event.metadata:
                    raise ValueError("mm_keys and metadata are other engines' fields; publish extra_keys instead")
                context = _context_of(event)
                if context != self._context:
                    if len(self._contexts) >= MAX_CONTEXTS:
                        self._contexts.clear()
                    self._context = self._contexts.setdefault(context, context)
                packed = pack_tokens(event.token_ids)  # type: ignore[arg-type]
                pool = self._pools.get((event.medium, event.group_idx)) or self._pool(event.medium, event.group_idx)
                if blocks == 1:
                    new = {hashes[0]: (parent, packed, extras[0] if extras else None, self._context)}
                else:
                    new, stride = {}, event.block_size * TOKEN_BYTES
                    for index, block_hash in enumerate(hashes):
                        tokens = packed[index * stride : (index + 1) * stride]
                        new[block_hash] = (parent, tokens, extras[index] if extras else None, self._context)
                        parent = block_hash
                for block_hash in new:
                    if block_hash not in pool.blocks:
                        pool.xor ^= low64(block_hash)
                pool.blocks.update(new)
            elif isinstance(event, BlockRemoved):
                pool = self._pool(event.medium, event.group_idx)
                for block_hash in event.block_hashes:
                    if pool.blocks.pop(block_hash, None) is not None:
                        pool.xor ^= low64(block_hash)
            elif isinstance(event, AllBlocksCleared):
                self.pools.clear()
                self._pools.clear()
                self._contexts.clear()
                self.words.clear()
                self._context = ()

    def _pool(self, medium: str | None, group: int | None) -> MirrorPool:
        pool = self._pools.get((medium, group))
        if pool is None:
            name = pool_name(medium, group)
            pool = self._pools[medium, group] = self.pools.setdefault(name, MirrorPool(*name))
        return pool

    def events(self) -> Iterator[BlockStored]:
        """The whole cache, parents before children, in runs of up to RUN_BLOCKS blocks."""
        yield from self.words
        for pool in self.pools.values():
            blocks = pool.blocks
            children: dict[Hash | None, list[Hash]] = {}
            for block_hash, block in blocks.items():
                children.setdefault(block[0] if block[0] in blocks else None, []).append(block_hash)
            starts = children.pop(None, [])
            while starts:
                run = [starts.pop()]
                context = blocks[run[0]][3]
                while followers := children.pop(run[-1], None):
                    starts += followers[1:]
                    if len(run) == RUN_BLOCKS or blocks[followers[0]][3] is not context:
                        starts.append(followers[0])
                        break
                    run.append(followers[0])
                held = [blocks[block_hash] for block_hash in run]
                packed = b"".join(block[1] for block in held)
                tokens = struct.unpack(f"<{len(packed) // TOKEN_BYTES}I", packed)
                extras = [block[2] for block in held]
                common = dict(zip(CONTEXT_FIELDS, context, strict=True))
                yield BlockStored(run, held[0][0], tokens, extra_keys=extras if any(extras) else None, **common)

    def snapshot(self, ts: float) -> list[bytes]:
        """The same as encoded batches of about SNAPSHOT_BATCH_BLOCKS blocks."""
        batches: list[bytes] = []
        events: list[Event] = []
        blocks = tokens = 0
        for event in self.events():
            events.append(event)
            blocks += len(event.block_hashes)
            tokens += len(event.token_ids)
            if blocks >= SNAPSHOT_BATCH_BLOCKS or tokens >= SNAPSHOT_BATCH_TOKENS:
                batches.append(encode_batch(EventBatch(ts, events)))
                events, blocks, tokens = [], 0, 0
        return [*batches, encode_batch(EventBatch(ts, events))] if events else batches
