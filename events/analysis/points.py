"""The points on which a stream is graded against docs/wire.md, each with its own small check.

A check looks at one fact, with the history before it, and says SKIP (the point does not apply or cannot be judged
here), OK, or what is wrong. A new point is two lines in _TABLE, one function, and one line at the end.
"""

import math
from collections import Counter
from itertools import repeat
from typing import NamedTuple

from events.cache.extras import chain_keys, chain_root, packed_tokens
from events.cache.groups import FULL, RULES
from events.messages import (
    REMOTE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    Hash,
    RejectedEvent,
    UnknownEvent,
)

SKIP = "skip"
OK = None
Verdict = str | None


class Point(NamedTuple):
    name: str
    says: str
    consequence: str  # a router's mistake after a failure


# Below each point, what becomes of a router where it fails.
_TABLE = """
three frames: a message has topic, sequence and payload
    It drops the message, and everything in it is missing.
sequence frame: 8 bytes, big-endian
    It sees gaps of billions of batches and asks for replays without end.
one topic: all messages have one topic
    It mixes two replicas' streams: restart upon restart, and a false tree.
batches readable: the payload is a msgpack batch
    It loses the batch and stays inexact until the cache is cleared.
sequence in order: each number once, ascending
    It takes a number that comes back for a restart and forgets the whole cache.
sequence without holes: every number comes, live or replayed
    It waits for a batch that never comes, or is inexact from there on.
replay ends: a replay ends with the end marker
    It cannot tell an empty replay from a dead one: repair by time-out.
replay layout: replies are ['', topic, seq, payload]
    It cannot read what it asked for: every gap is permanent.
replay in order: replies ascend without holes
    It takes the hole for batches lost for good and becomes inexact.
replay honours start: it begins at the number asked for
    It cannot tell what is no longer buffered from what is skipped.
replay equals live: the same bytes under the same number
    It takes the difference for a restart and forgets the whole cache.
timestamps monotone: time stamps never go back
    Its figures of lag and age are wrong; the tree is not.
one rank: one data-parallel rank per stream
    It takes two ranks' caches for one and matches falsely.
known types: no events but the three of wire.md
    It misses whatever that event changes.
events whole: events of a known type can be read
    It misses the event and is inexact.
known fields: no fields but those of wire.md
    It ignores them; if they change what a block means, it matches falsely.
parents first: a parent is stored before its children
    It cannot name the block until the parent comes: cached prefixes go unseen.
tokens pairable: block_size tokens for each hash
    It cannot tell which tokens a hash stands for: these blocks are never matched.
block size constant: one block_size per group
    It cuts prompts at the wrong places, and nothing matches.
extra keys per block: as many extra_keys as hashes
    It cannot tell which block an image stands in: prompts match falsely or not at all.
one kind of hash: integers, or bytes of one length
    It does not find the parent or the block removed, named in another kind.
same hash, same content: a hash keeps its tokens and parent
    It credits a replica with a prefix that is not there.
same content, same hash: a prefix keeps its hash
    It takes blocks apart by something unsaid (a salt, a LoRA) for one, and matches falsely.
removals matched: only what is stored is removed
    Its count of copies is wrong: a block seems gone that is there, or there that is gone.
"""
_LINES = _TABLE.strip().splitlines()
POINTS = [
    Point(*point.split(": ", 1), consequence.strip())  # type: ignore[call-arg]  # a name, and what is demanded
    for point, consequence in zip(_LINES[::2], _LINES[1::2], strict=True)
]


# ---- the stream so far, by the engine's own hashes


class Group:
    """One KV-cache group of the engine. Everything ever stored is remembered, for as long as the check runs."""

    def __init__(self) -> None:
        self.block_size: int | None = None
        self.key_of: dict[Hash, int | None] = {}  # None: its tokens could not be paired
        self.hash_of: dict[int, Hash] = {}
        self.copies: Counter[tuple[str, Hash]] = Counter()


class History:
    def __init__(self) -> None:
        self.complete = False  # it begins with an empty cache and misses nothing
        self.ts: float | None = None
        self.rank: int | None = None
        self.batches = 0
        self.hash_kind: str | None = None
        self.media: set[str] = set()
        self.groups: dict[int, Group] = {}

    def group(self, event: BlockStored | BlockRemoved) -> Group:
        return self.groups.setdefault(event.group_idx or 0, Group())

    def chain(self, event: BlockStored) -> list[int] | None:
        """The event's blocks named by content, or None if its tokens cannot be paired or the parent's are unknown."""
        # The names of adapters may be given again, so their numbers stand for a model.
        parent: int | None = chain_root(event, "" if event.lora_id is None else str(event.lora_id))
        if event.parent_block_hash is not None:
            parent = self.group(event).key_of.get(event.parent_block_hash)
        return None if parent is None else chain_keys(event, parent)

    def add(self, event: Event) -> None:
        if isinstance(event, BlockStored):
            group, medium = self.group(event), place_of(event)
            self.media.add(medium)
            if group.block_size is None:
                group.block_size = event.block_size
            for block_hash, key in zip(event.block_hashes, self.chain(event) or repeat(None), strict=False):
                self.hash_kind = self.hash_kind or kind_of(block_hash)
                group.copies[medium, block_hash] += 1
                if group.key_of.get(block_hash) is None:
                    group.key_of[block_hash] = key
                if key is not None:
                    group.hash_of.setdefault(key, block_hash)
        elif isinstance(event, BlockRemoved):
            for block_hash in event.block_hashes:
                if (copies := self.group(event).copies)[place_of(event), block_hash] > 0:
                    copies[place_of(event), block_hash] -= 1
        elif isinstance(event, AllBlocksCleared):
            self.complete = True
            for group in self.groups.values():
                group.copies.clear()


def place_of(event: BlockStored | BlockRemoved) -> str:
    """The event's medium; a place that replicas share is one of its own."""
    medium = event.medium or "GPU"
    return f"{medium} ({REMOTE.lower()})" if event.locality == REMOTE else medium


def whole_prefix(event: BlockStored) -> bool:
    """Return True if the event's group keeps whole prefixes: other kinds do not tell how much can be reused."""
    kind = event.kv_cache_spec_kind
    return kind is None or RULES.get(kind) == FULL


def kind_of(block_hash: Hash) -> str:
    return f"{len(block_hash)} bytes" if isinstance(block_hash, bytes) else "integers"


def show(block_hash: Hash | None) -> str:
    """A hash as it stands in a message: the first 16 hex digits of bytes."""
    return f"0x{block_hash.hex()[:16]}" if isinstance(block_hash, bytes) else str(block_hash)


# ---- live messages: the frames, and the topic of the first message


def three_frames(frames: list[bytes], _: bytes) -> Verdict:
    sizes = ", ".join(str(len(frame)) for frame in frames)
    return OK if len(frames) == 3 else f"{len(frames)} frames of {sizes} bytes; topic, sequence, payload are expected"


def sequence_frame(frames: list[bytes], _: bytes) -> Verdict:
    if len(frames) != 3:
        return SKIP
    if len(frames[1]) != 8:
        return f"the sequence frame has {len(frames[1])} bytes, not 8"
    big, little = int.from_bytes(frames[1], "big"), int.from_bytes(frames[1], "little")
    return f"{frames[1].hex()} looks little-endian: {big}, or {little}?" if little < 2**40 <= big else OK


def one_topic(frames: list[bytes], topic: bytes) -> Verdict:
    if len(frames) != 3:
        return SKIP
    return OK if frames[0] == topic else f"topic {frames[0]!r} after {topic!r}"


# ---- batches


def timestamps(history: History, batch: EventBatch) -> Verdict:
    if not math.isfinite(batch.ts):
        return f"the time stamp is {batch.ts}"
    if history.ts is None:
        return SKIP
    return OK if batch.ts >= history.ts else f"{batch.ts:.6f} after {history.ts:.6f}"


def one_rank(history: History, batch: EventBatch) -> Verdict:
    if not history.batches:
        return SKIP
    same = batch.data_parallel_rank == history.rank
    return OK if same else f"data-parallel rank {batch.data_parallel_rank} after {history.rank}"


def known_types(_: History, batch: EventBatch) -> Verdict:
    unknown = [event.type_name for event in batch.events if isinstance(event, UnknownEvent)]
    return f"an event of type {unknown[0]!r}" if unknown else OK


def whole_events(_: History, batch: EventBatch) -> Verdict:
    rejected = [event.reason for event in batch.events if isinstance(event, RejectedEvent)]
    return rejected[0] if rejected else OK


# ---- stores


def parents_first(history: History, event: BlockStored) -> Verdict:
    parent, group = event.parent_block_hash, history.group(event)
    if parent is None or not whole_prefix(event):
        return SKIP
    if any(group.copies[medium, parent] > 0 for medium in history.media):
        return OK
    if not history.complete:
        return SKIP
    when = "was removed before" if parent in group.key_of else "was never stored"
    return f"block {show(event.block_hashes[0] if event.block_hashes else None)}: its parent {show(parent)} {when}"


def pairable(history: History, event: BlockStored) -> Verdict:
    if not whole_prefix(event):
        return SKIP
    hashes, tokens = event.block_hashes, packed_tokens(event)
    if not event.token_ids:
        unknown = [h for h in hashes if all(h not in group.key_of for group in history.groups.values())]
        if unknown and not history.complete:
            return SKIP
        return f"block {show(unknown[0])} comes without tokens and was not stored before" if unknown else OK
    if tokens is None:
        return f"token ids that are no unsigned 32-bit integers: {str(list(event.token_ids))[:60]}"
    expected = len(hashes) * event.block_size
    given = len(tokens) // 4
    return OK if given == expected else f"{given} tokens for {len(hashes)} blocks of {event.block_size}"


def one_block_size(history: History, event: BlockStored) -> Verdict:
    known = history.group(event).block_size
    if event.block_size < 1:
        return f"block_size is {event.block_size}"
    return OK if known in (None, event.block_size) else f"block_size {event.block_size} after {known}"


def extras_by_block(_: History, event: BlockStored) -> Verdict:
    if event.extra_keys is None:
        return SKIP
    blocks, extras = len(event.block_hashes), len(event.extra_keys)
    return OK if blocks == extras else f"{extras} extra_keys for {blocks} blocks"


def one_hash_kind(history: History, event: BlockStored) -> Verdict:
    kind = history.hash_kind or (kind_of(event.block_hashes[0]) if event.block_hashes else None)
    if kind is None:
        return SKIP
    others = [block_hash for block_hash in event.block_hashes if kind_of(block_hash) != kind]
    return f"hash {show(others[0])} is of {kind_of(others[0])}, those before of {kind}" if others else OK


def same_hash_same_content(history: History, event: BlockStored) -> Verdict:
    chain, key_of = history.chain(event), history.group(event).key_of
    if not chain:
        return SKIP
    known = [(h, key) for h, key in zip(event.block_hashes, chain, strict=True) if key_of.get(h) is not None]
    wrong = [h for h, key in known if key_of[h] != key]
    if wrong:
        return f"hash {show(wrong[0])} was announced before with other tokens, extra keys or parent"
    return OK if known else SKIP


def same_content_same_hash(history: History, event: BlockStored) -> Verdict:
    chain, hash_of = history.chain(event), history.group(event).hash_of
    if not chain:
        return SKIP
    known = [(h, hash_of[key]) for h, key in zip(event.block_hashes, chain, strict=True) if key in hash_of]
    wrong = [(h, before) for h, before in known if h != before]
    if wrong:
        return f"hashes {show(wrong[0][1])} and {show(wrong[0][0])} stand for the same prefix"
    return OK if known else SKIP


# ---- removals


def removals_matched(history: History, event: BlockRemoved) -> Verdict:
    copies, medium = history.group(event).copies, place_of(event)
    unknown = [h for h in set(event.block_hashes) if copies[medium, h] < event.block_hashes.count(h)]
    if unknown and not history.complete:
        return SKIP
    return f"block {show(unknown[0])} is removed from {medium}, where it was not" if unknown else OK


# These have the name of their points; all others are graded by `Conformance`, from the order of messages.
LIVE_CHECKS = {"three frames": three_frames, "sequence frame": sequence_frame, "one topic": one_topic}
BATCH_CHECKS = {
    "timestamps monotone": timestamps,
    "one rank": one_rank,
    "known types": known_types,
    "events whole": whole_events,
}
STORE_CHECKS = {
    "parents first": parents_first,
    "tokens pairable": pairable,
    "block size constant": one_block_size,
    "extra keys per block": extras_by_block,
    "one kind of hash": one_hash_kind,
    "same hash, same content": same_hash_same_content,
    "same content, same hash": same_content_same_hash,
}
