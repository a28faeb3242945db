"""The publisher's own copy of the replica's cache, from which snapshots and digests are made."""

import struct
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from events.blocks import TOKEN_BYTES, pack_tokens
from events.messages import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, Hash, KnownEvent, encode_batch
from events.pool import low64
from events.resolver import Digest

RUN_BLOCKS = 64
RUNS_PER_BATCH = 32


# Plain tuples: a named one costs as much to make as everything else done for a block.
# What the blocks of one event have in common: block size, LoRA id, LoRA name, medium, group, cache salt.
Context: TypeAlias = tuple[int, int | None, str | None, str | None, int | None, str | None]
# Parent hash, packed tokens, extra keys, context.
MirroredBlock: TypeAlias = tuple[Hash | None, bytes, list[object] | None, Context]


class Mirror:
    """Every resident block by hash. The engine announces first copies and last removals only, so a set is enough."""

    def __init__(self) -> None:
        self.blocks: dict[Hash, MirroredBlock] = {}
        self._xor = 0
        self._contexts: dict[Context, Context] = {}

    def digest(self) -> Digest:
        return Digest(len(self.blocks), self._xor)

    def apply(self, events: Iterable[KnownEvent]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    if self.blocks.pop(block_hash, None) is not None:
                        self._xor ^= low64(block_hash)
            elif isinstance(event, AllBlocksCleared):
                self.blocks.clear()
                self._contexts.clear()
                self._xor = 0

    def _store(self, event: BlockStored) -> None:
        extras, parent, blocks = event.extra_keys, event.parent_block_hash, self.blocks
        if event.mm_keys or event.metadata:
            raise ValueError("mm_keys and metadata are other engines' fields; publish what they say as extra_keys")
        group, salt = event.group_idx, event.cache_salt
        context = (event.block_size, event.lora_id, event.lora_name, event.medium, group, salt)
        context = self._contexts.setdefault(context, context)
        packed = pack_tokens(event.token_ids)  # type: ignore[arg-type]
        stride = event.block_size * TOKEN_BYTES
        for index, block_hash in enumerate(event.block_hashes):
            if block_hash not in blocks:
                self._xor ^= low64(block_hash)
            tokens = packed[index * stride : (index + 1) * stride]
            blocks[block_hash] = (parent, tokens, extras[index] if extras else None, context)
            parent = block_hash

    def events(self) -> Iterator[BlockStored]:
        """The whole cache, parents before children, in runs of up to RUN_BLOCKS blocks."""
        children: dict[Hash | None, list[Hash]] = {}
        for block_hash, block in self.blocks.items():
            children.setdefault(block[0] if block[0] in self.blocks else None, []).append(block_hash)
        starts = children.pop(None, [])
        while starts:
            run = [starts.pop()]
            context = self.blocks[run[0]][3]
            while followers := children.pop(run[-1], None):
                starts += followers[1:]
                if len(run) == RUN_BLOCKS or self.blocks[followers[0]][3] is not context:
                    starts.append(followers[0])
                    break
                run.append(followers[0])
            yield self._run(run, context)

    def snapshot(self, ts: float) -> list[bytes]:
        """The same as encoded batches."""
        events = list(self.events())
        starts = range(0, len(events), RUNS_PER_BATCH)
        return [encode_batch(EventBatch(ts, list(events[first : first + RUNS_PER_BATCH]))) for first in starts]

    def _run(self, hashes: list[Hash], context: Context) -> BlockStored:
        blocks = [self.blocks[block_hash] for block_hash in hashes]
        packed = b"".join(block[1] for block in blocks)
        extras = [block[2] for block in blocks]
        block_size, lora_id, lora_name, medium, group, salt = context
        return BlockStored(
            hashes,
            blocks[0][0],
            struct.unpack(f"<{len(packed) // TOKEN_BYTES}I", packed),
            block_size,
            lora_id,
            medium,
            lora_name,
            extras if any(extras) else None,
            group,
            cache_salt=salt if blocks[0][0] is None else None,
        )
