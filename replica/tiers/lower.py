"""The media below the pool: which of its blocks go there, and where a prompt's are found. Pure, like the pool.

    host    a block goes there when the pool gives it up; with a disk, as soon as it is named
    disk    what has come to the host is written there in the background

A block that is loaded again keeps its slot, as the next of the host's to be given up: while the pool has the block,
the slot is only a copy, and if it is still there when the pool gives the block up, nothing needs to move.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from events.messages import KnownEvent
from replica.chain import Chain
from replica.contents import NOT_NAMED, Contents, Origin
from replica.names import NOBODY, Keys, Slots
from replica.tiers.moves import Load, Save, Write, Written
from replica.tiers.record import Record
from replica.tiers.recovery import Recovery
from replica.tiers.tier import Tier

HOST = "CPU"
DISK = "STORAGE"
# Of the host's slots, so many at most wait to be written: the others stay free for what the pool gives up.
DIRTY_FRACTION = 0.5


class Note(NamedTuple):
    """The rest of a block's content, as a record keeps it."""

    exact: bytes | None
    origin: Origin | None


NO_NOTE = Note(None, None)
_encode = msgspec.msgpack.Encoder().encode
_decode_note: Callable[[bytes], Note] = msgspec.msgpack.Decoder(Note).decode


class LowerTiers:
    """`events` collects what happens, in the order in which the world should hear it."""

    def __init__(self, contents: Contents, host_slots: int, disk_slots: int, events: list[KnownEvent] | None) -> None:
        first = contents.num_blocks
        self.host = Tier(HOST, first, host_slots, contents)
        self.disk = Tier(DISK, first + host_slots, disk_slots, contents) if disk_slots else None
        self.tiers = [self.host] if self.disk is None else [self.host, self.disk]
        self.saved_early = disk_slots > 0  # a crash would take what only the pool has
        self.unsaved = 0  # blocks given up for good, as every slot was held
        self.unwritten = 0  # blocks that the disk was too slow for
        self._contents = contents
        self._events = events
        self._saves: list[Save] = []
        self._erasures: list[int] = []
        self.writing = 0  # slots that wait to be written

    def restore(self, recovery: Recovery) -> None:
        """Name what the disk has kept of an earlier process, parents first, its slots counted from 0."""
        disk, contents = self.disk, self._contents
        recovered = recovery.records
        if disk is None or not recovered:
            return
        keys = {record.identity: record.key for _, record in recovered}
        for own, record in recovered:
            slot = own + disk.first
            contents.identity[slot], contents.parent[slot] = record.identity, record.parent
            contents.filled[slot] = contents.block_size
            contents.tokens[slot] = np.frombuffer(record.tokens, contents.tokens.dtype)[0]
            contents.parent_keys[slot] = keys.get(record.parent, 0)
            if record.exact is not None:
                note = _decode_note(record.exact)
                if note.exact is not None:
                    contents.exact[slot] = note.exact
                if note.origin is not None:
                    contents.origins[slot] = note.origin
        contents.last_identity = recovery.last_identity
        slots = np.array([slot for slot, _ in recovered], np.intp) + disk.first
        disk.name(slots, np.array([record.key for _, record in recovered], np.uint64))
        disk.refresh(slots[::-1])
        self._say(disk.stored(slots))

    # ---- look up

    def fill_in(self, slots: Slots, keys: Keys) -> None:
        """Where the pool has no block for a key, put the slot of the fastest medium that has one."""
        for tier in self.tiers:
            if tier.named:
                missing = np.flatnonzero(slots == NOBODY)
                slots[missing] = tier.find_many(keys[missing])

    def has_any(self, keys: Keys) -> bool:
        return any(tier.named and bool((tier.find_many(keys) != NOBODY).any()) for tier in self.tiers)

    def identity(self, chain: Chain, index: int) -> int:
        """The identity of the chain's block `index` where a lower medium has it; 0: none does."""
        for tier in self.tiers:
            slot = tier.find(chain.keys[index]) if tier.named else NOBODY
            if slot != NOBODY and self._contents.is_same(slot, chain, index):
                return self._contents.identity[slot]
        return 0

    def medium(self, slot: int) -> str:
        return self._of(slot).medium

    def _of(self, slot: int) -> Tier:
        return self.host if slot in self.host or self.disk is None else self.disk

    # ---- save

    def save(self, blocks: Slots, keys: Keys) -> None:
        """Keep these named blocks, given heads first, in the host's memory; `take_saves` says what has to move."""
        host, contents = self.host, self._contents
        slots = host.find_many(keys) if host.named else np.full(len(keys), NOBODY, np.intp)
        is_there = slots != NOBODY
        if is_there.any():
            same = contents.many_identities[slots] == contents.many_identities[blocks]
            host.refresh(slots[is_there & same][::-1])
            self._say(host.drop(slots[is_there & ~same]))  # its parent is gone for good, or its key collides
            blocks, keys = blocks[~(is_there & same)], keys[~(is_there & same)]
        # With too little room the heads are kept, without which nobody would find the rest.
        given, evicted = host.take(len(blocks))
        self._say(evicted)
        self.unsaved += len(blocks) - len(given)
        blocks, keys = blocks[: len(given)], keys[: len(given)]
        contents.copy(blocks, given)
        host.name(given, keys)
        self._say(host.stored(given))
        self._saves += map(Save, blocks.tolist(), given.tolist())

    def take_saves(self) -> list[Save]:
        """Return the saves since the last call, whose slots are held until they are `saved`."""
        saves, self._saves = self._saves, []
        return saves

    def saved(self, saves: Sequence[Save]) -> list[Write]:
        """End the holds of saves that are done; return what is to be written to the disk now."""
        slots = [save.slot for save in saves]
        writes = self._writes(slots) if self.disk is not None else []
        self.host.release(slots)
        return writes

    # ---- write

    def _writes(self, slots: Sequence[int]) -> list[Write]:
        disk, contents = self.disk, self._contents
        assert disk is not None
        sources = np.array([slot for slot in slots if contents.filled[slot]], np.intp)
        sources = sources[disk.find_many(self.host.keys(sources)) == NOBODY]
        room = min(int(self.host.num_slots * DIRTY_FRACTION) - self.writing, disk.free)
        self.unwritten += max(0, len(sources) - max(0, room))
        sources = sources[: max(0, room)]
        targets, evicted = disk.take(len(sources))
        self._say(evicted)
        self.host.hold(sources.tolist())
        self.writing += len(sources)
        records = map(self._record, sources.tolist())
        return list(map(Write, sources.tolist(), targets.tolist(), records))

    def written(self, outcomes: Sequence[Written]) -> None:
        """Name the blocks that have come to the disk."""
        if not outcomes:
            return
        disk = self.disk
        assert disk is not None
        self.writing -= len(outcomes)
        for (source, slot, _), done in outcomes:
            slots, sources = np.array([slot], np.intp), np.array([source], np.intp)
            key = self.host.keys(sources)
            if done and self._contents.filled[source] and disk.find(int(key[0])) == NOBODY:
                self._contents.copy(sources, slots)
                disk.name(slots, key)
                self._say(disk.stored(slots))
            elif done:
                self._erasures.append(slot)
            self.host.release([source])
            disk.release([slot])

    def _record(self, slot: int) -> Record:
        contents = self._contents
        note = Note(contents.exact.get(slot), contents.origins.get(slot))
        return Record(
            int(self._of(slot).keys(np.array([slot], np.intp))[0]),
            contents.identity[slot],
            contents.parent[slot],
            contents.tokens[slot].tobytes(),
            None if note == NO_NOTE else _encode(note),
        )

    # ---- load

    def loads(self, slots: Sequence[int], blocks: Sequence[int]) -> list[Load]:
        return [
            Load(slot, block, self.medium(slot), None if slot in self.host else self._record(slot))
            for slot, block in zip(slots, blocks, strict=True)
        ]

    def hold(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._of(slot).hold([slot])

    def release(self, slots: Sequence[int], *, loaded: bool) -> None:
        """End the holds of slots in the order of a prompt. `loaded`: the pool has their contents again."""
        for tier in self.tiers:
            own = [slot for slot in slots if slot in tier]
            tier.release(own, next_to_go=loaded and tier is self.host)

    def drop(self, slots: Sequence[int]) -> None:
        """Forget slots whose KV turned out to be something else."""
        for slot in slots:
            if self._contents.filled[slot]:
                self._say(self._of(slot).drop(np.array([slot], np.intp)))
                if slot not in self.host:
                    self._erasures.append(slot)

    def clear(self) -> None:
        """Forget everything; the contents are cleared elsewhere, after this."""
        if self.disk is not None:
            self._erasures += self.disk.slots().tolist()
        for tier in self.tiers:
            tier.clear()

    def take_erasures(self) -> list[int]:
        """Return the disk's slots that have been forgotten, so that a restart does not find them."""
        erasures, self._erasures = self._erasures, []
        return erasures

    # ---- say

    def _say(self, events: list[KnownEvent]) -> None:
        if self._events is not None:
            self._events += events

    def check(self) -> None:
        """Verify every invariant; AssertionError says which one does not hold."""
        for tier in self.tiers:
            tier.check()
        known: dict[int, int] = {}
        for slot in range(len(self._contents.identity)):
            if self._contents.filled[slot] == self._contents.block_size and self._contents.parent[slot] != NOT_NAMED:
                first = known.setdefault(self._contents.identity[slot], slot)
                self._contents.check_copies(first, [slot])
