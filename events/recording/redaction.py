"""Takes the prompts out of a recording and leaves its structure.

What stays: times, sequence numbers, gaps, duplicates, restarts, status; and of every event its type, medium, group,
block size, and how many blocks and tokens it has, those that its hashes look ahead to included. What goes: token ids
(zeros stand for them), extra keys, salts, metadata. LoRA names and session ids become digests under a secret that is
thrown away.

A foreign engine's hashes can only be resolved by tokens. So every hash is replaced by the block's KEY: the redacted
stream is a native one, which resolver, tree and router read without tokens, and its keys are the original's. The first
block of a chain names the root key as its parent, because the root cannot be computed again from digests. A block whose
key cannot be known is named by a digest: what hangs on a parent that was never seen is an orphan no more, and what
could not be paired with tokens is paired with a key that no prompt has.

A key is a hash of tokens: it reveals nothing by itself, but lets a reader check a guess of a whole prompt.

A batch that was sent after a lost one can be named only once the lost one has been replayed. So records wait in memory
for up to HOLD_S. The same payload is always redacted to the same bytes, as duplicates are recognized by their bytes.
"""

import math
import secrets
from collections import deque
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from events.cache.extras import has_pairs
from events.cache.resolver import Resolver
from events.messages import AllBlocksCleared, BadBatch, BlockRemoved, BlockStored, Decoder, Event, Hash, UnknownEvent
from events.native import decode_snapshot_header
from events.source import Record, Source

HOLD_S = 10.0
HOLD_RECORDS = 50_000
REMEMBERED_NAMES = 1_000_000
REMEMBERED_PAYLOADS = 4096
UNREADABLE = b"\xc1"  # a byte that msgpack never uses

_encode = msgspec.msgpack.Encoder().encode


class Redactor:
    def __init__(self, sources: Sequence[Source]) -> None:
        secret = secrets.token_bytes(32)
        self._names = [Names(source.model, source.native, secret) for source in sources]
        self._held: deque[Record] = deque()

    def redact(self, record: Record) -> list[Record]:
        """The records that can be written now; this one may have to wait."""
        payload = _payload(record)
        if payload is not None:
            self._names[record.source].learn(payload)
        self._held.append(record)
        return list(self.flush(record.time))

    def flush(self, now_s: float = math.inf) -> Iterator[Record]:
        while self._held:
            record = self._held[0]
            names, frames, payload = self._names[record.source], record.frames, _payload(record)
            waits = now_s - record.time < HOLD_S and len(self._held) <= HOLD_RECORDS
            if waits and payload is not None and not names.knows(payload):
                return
            if payload is not None:
                frames = [*frames[:-1], names.redact(payload)]
            elif not _is_known(record):
                frames = [bytes(len(frame)) for frame in frames]  # strange: only its shape is kept
            yield msgspec.structs.replace(self._held.popleft(), frames=frames)


class Names:
    """The names that one source's hashes get: their keys, as far as a resolver can tell that reads ahead.

    It takes stores as they come and removals much later, so that a late batch finds its parent.
    """

    def __init__(self, model: str, native: bool, secret: bytes) -> None:
        self._secret = secret
        self._native = native
        self._model = model
        self._resolver = Resolver(model)
        self._digests: dict[Hash, int] = {}  # names of the hashes whose keys were not known in time
        self._removals: deque[BlockRemoved] = deque()  # not given to the resolver yet
        self._removed = 0  # blocks of these
        self._payloads: dict[bytes, bytes] = {}

    def learn(self, payload: bytes) -> None:
        if self._native:
            return
        if self._resolver.capacity.full is not None:  # removals were lost, and their blocks fill it
            self._resolver = Resolver(self._model)
        self._resolver.apply([event for event in _events(payload) if isinstance(event, BlockStored)])

    def knows(self, payload: bytes) -> bool:
        if self._native:
            return True
        hashes: list[Hash | None] = []
        for event in _events(payload):
            if isinstance(event, BlockStored):
                hashes += [event.parent_block_hash, *event.block_hashes]
            elif isinstance(event, BlockRemoved):
                hashes += event.block_hashes
        return all(h is None or self._key(h) is not None for h in hashes)

    def redact(self, payload: bytes) -> bytes:
        digest = blake2b(payload, digest_size=16).digest()
        redacted = self._payloads.get(digest)
        if redacted is None:
            try:
                batch = Decoder().decode(payload)
                events = [self._redact_event(event) for event in batch.events]
                redacted = _encode([batch.ts, events, batch.data_parallel_rank])
            except BadBatch:
                redacted = UNREADABLE
            self._payloads[digest] = redacted
            if len(self._payloads) > REMEMBERED_PAYLOADS:
                del self._payloads[next(iter(self._payloads))]
        return redacted

    def _redact_event(self, event: Event) -> Any:
        if isinstance(event, BlockStored):
            parent = event.parent_block_hash
            return msgspec.structs.replace(
                event,
                block_hashes=[self._name(block_hash) for block_hash in event.block_hashes],
                parent_block_hash=self._resolver.naming.root(event) if parent is None else self._name(parent),
                token_ids=[(0, 0) if has_pairs(event) else 0] * len(event.token_ids),
                lora_name=self._pseudonym("lora", event.lora_name),
                session_id=self._pseudonym("session", event.session_id),
                lookahead_token_ids=[[0] * len(ahead) for ahead in event.lookahead_token_ids or ()] or None,
                **dict.fromkeys(("extra_keys", "cache_salt", "metadata", "mm_keys")),
            )
        if isinstance(event, BlockRemoved):
            named = [self._name(block_hash) for block_hash in event.block_hashes]
            self._removals.append(event)
            self._removed += len(event.block_hashes)
            while self._removed > REMEMBERED_NAMES:
                oldest = self._removals.popleft()
                self._removed -= len(oldest.block_hashes)
                self._resolver.apply([oldest])
                for block_hash in oldest.block_hashes:
                    self._digests.pop(block_hash, None)
            return msgspec.structs.replace(event, block_hashes=named)
        if isinstance(event, AllBlocksCleared):
            return event
        # A type that nobody knows stays one, and an event that cannot be read stays unreadable.
        return {"type": event.type_name[:80]} if isinstance(event, UnknownEvent) else {"type": "BlockStored"}

    def _key(self, block_hash: Hash) -> int | None:
        if self._native and isinstance(block_hash, int):
            return block_hash
        key = self._digests.get(block_hash)
        if key is None:
            key = self._resolver.naming.key(block_hash)
        return self._resolver.naming.hash_chain.key(block_hash) if key is None and self._resolver.groups.sparse else key

    def _name(self, block_hash: Hash) -> int:
        """The key, or from now on a digest of the hash."""
        key = self._key(block_hash)
        if key is None:
            key = self._digests[block_hash] = int.from_bytes(self._digest(block_hash)[:8], "big")
        return key

    def _pseudonym(self, kind: str, name: str | None) -> str | None:
        return None if name is None else f"{kind}-{self._digest(name)[:4].hex()}"

    def _digest(self, value: Hash | str) -> bytes:
        return blake2b(_encode(value), key=self._secret, digest_size=16).digest()


def _payload(record: Record) -> bytes | None:
    """The event batch that the record holds."""
    frames = record.frames
    if not _is_known(record) or (record.kind == "replay" and not frames[-1]):
        return None
    if record.kind == "snapshot":
        try:
            decode_snapshot_header(frames[1])
        except msgspec.DecodeError:
            return frames[1]
        return None
    return frames[-1] if record.kind in ("events", "replay") else None


def _is_known(record: Record) -> bool:
    """Return True for a record of a known form: without a payload, it holds no prompts."""
    return len(record.frames) in {"events": (3,), "replay": (3, 4), "snapshot": (2,)}.get(
        record.kind, (len(record.frames),)
    )


def _events(payload: bytes) -> list[Event]:
    try:
        return Decoder().decode(payload).events
    except BadBatch:
        return []
