"""A batch of events in slices of bounded work, so that other work can run in between."""

from collections.abc import Iterable, Iterator
from contextlib import suppress

from msgspec import Raw
from msgspec.structs import asdict, replace

from events.cache.extras import part_of
from events.messages import BlockRemoved, BlockStored, Event, decode_tokens

SLICE_BLOCKS = 2048  # some milliseconds of work

_NOT_PAIRED = (0,)  # token ids that belong to no number of blocks


class StoredPiece(BlockStored, tag="BlockStored", kw_only=True):
    """Some blocks of a long event."""

    start: int  # blocks of the event before these


def slices(events: Iterable[Event], blocks: int = SLICE_BLOCKS) -> Iterator[list[Event]]:
    """Split events into lists of about this many blocks; applied in order they equal the whole batch."""
    part: list[Event] = []
    room = blocks
    for event in events:
        size = blocks_of(event)
        if size <= room:
            part.append(event)
            room -= size
        else:
            if part:
                yield part
            *whole, last = _pieces(event, size, blocks)
            yield from ([piece] for piece in whole)
            part, room = [last], blocks // 2
        if room <= 0:
            yield part
            part, room = [], blocks
    if part:
        yield part


def blocks_of(event: Event) -> int:
    """The event's size as work, in blocks."""
    return len(event.block_hashes) or 1 if isinstance(event, BlockStored | BlockRemoved) else 1


def _pieces(event: Event, size: int, blocks: int) -> Iterator[Event]:
    if size <= blocks:
        yield event
    elif isinstance(event, BlockRemoved):
        for start in range(0, size, blocks):
            yield replace(event, block_hashes=event.block_hashes[start : start + blocks])
    elif isinstance(event, BlockStored):
        if event.parent_block_hash is None:  # whoever doubts its hashes compares the first piece with its tokens
            with suppress(ValueError):
                event = decode_tokens(event)
        hashes, tokens, block_size = event.block_hashes, event.token_ids, event.block_size
        for start in range(0, size, blocks):  # each piece is the parent of the next one
            end = start + blocks
            own = part_of(event, start, end)
            own["parent_block_hash"] = hashes[start - 1] if start else event.parent_block_hash
            if isinstance(tokens, Raw):  # not decoded because nobody looks at them
                yield replace(event, **own)
                continue
            if tokens:
                paired = len(tokens) == block_size * len(hashes)
                own["token_ids"] = tokens[start * block_size : end * block_size] if paired else _NOT_PAIRED
            yield StoredPiece(**asdict(event) | own, start=start)
