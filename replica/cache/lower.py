"""The media below the pool: which of its blocks go there, and where a prompt's are found. Pure, like the pool.

    host    a block goes there when the pool gives it up; with a disk, as soon as it is named
    disk    what has come to the host is written there in the background

A block that is loaded again keeps its slot, as the next of the host's to be given up: while the pool has the block,
the slot is only a copy, and if it is still there when the pool gives the block up, nothing needs to move.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from events.messages import KnownEvent
from replica.cache.chain import Chain
from replica.cache.contents import NOT_NAMED, SEVERAL, Contents, Origin
from replica.cache.moves import Load, Save, Write, Written
from replica.cache.names import NOBODY, Keys, Slots
from replica.cache.tier import Tier
from replica.disk.record import Record, Recovered, Recovery

HOST = "CPU"
DISK = "STORAGE"
# No more of the host's slots than these wait to be written: the others stay free for what the pool gives up.
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
        self.host = Tier(HOST, first, host_slots, contents, events)
        self.disk = Tier(DISK, first + host_slots, disk_slots, contents, events) if disk_slots else None
        self.tiers = [self.host] if self.disk is None else [self.host, self.disk]
        self.unsaved = 0  # blocks given up for good, as every slot was held
        self.unwritten = 0  # blocks that the disk was too slow for
        self._contents = contents
        self._saves: list[Save] = []
        self._erasures: set[int] = set()
        self.writing = 0  # slots that wait to be written

    def restore(self, recovery: Recovery) -> None:
        """Name what the disk has kept of an earlier process, parents first, its slots counted from 0."""
        disk, contents = self.disk, self._contents
        if disk is None or not recovery.records:
            return
        by_key: dict[int, Recovered] = {}  # the first of colliding ones
        for one in recovery.records:
            by_key.setdefault(one.record.key, one)
        recovered = by_key.values()
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
        disk.name(slots, np.array(list(by_key), np.uint64))
        disk.refresh(slots[::-1])

    # ---- look up

    def fill_in(self, slots: Slots, keys: Keys) -> None:
        """Put the slot of the fastest medium that has a key wherever the pool has no block for it."""
        for tier in self.tiers:
            if tier.named:
                missing = np.flatnonzero(slots == NOBODY)
                slots[missing] = tier.find_many(keys[missing])

    def has(self, key: int) -> bool:
        return any(tier.named and tier.find(key) != NOBODY for tier in self.tiers)

    def identities(self, chain: Chain, start: int, stop: int) -> NDArray[np.int64] | None:
        """The identities of the chain's blocks from `start`, its next, that follow each other in lower media.

        None: another content that has the same key comes next.
        """
        assert chain.identity is not None
        keys = np.frombuffer(chain.keys, np.uint64, stop - start, start * chain.keys.itemsize)
        slots = np.full(len(keys), NOBODY, np.intp)
        self.fill_in(slots, keys)
        missing = np.flatnonzero(slots == NOBODY)
        found = slots[: missing[0]] if missing.size else slots
        same = self._contents.count_same(chain, found, start, chain.identity)
        return self._contents.many_identities[found] if same == len(found) else None

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

    def save_early(self, blocks: Slots, keys: Keys) -> None:
        """As `save` does, but for what the disk has: a crash would not take it."""
        if self.disk is not None and self.disk.named:
            is_new = ~self._has(self.disk, blocks, keys)
            blocks, keys = blocks[is_new], keys[is_new]
        if blocks.size:
            self.save(blocks, keys)

    def save(self, blocks: Slots, keys: Keys) -> None:
        """Keep these named blocks, given heads first, in the host's memory; `take_saves` says what has to move."""
        host, contents = self.host, self._contents
        slots = host.find_many(keys)
        if (slots != NOBODY).any():
            is_same = self._has(host, blocks, keys)
            host.refresh(slots[is_same][::-1])
            contents.followed(slots[is_same], contents.next_identities[blocks[is_same]])
            blocks, keys = blocks[~is_same], keys[~is_same]
            self._forget_others(slots[~is_same])
        # The heads are kept if there is too little room: nobody would find the rest without them.
        given = host.take(len(blocks))
        self.unsaved += len(blocks) - len(given)
        if not given.size:
            return
        blocks, keys = blocks[: len(given)], keys[: len(given)]
        contents.copy(blocks, given)
        host.name(given, keys)
        self._saves += map(Save, blocks[::-1].tolist(), given[::-1].tolist())

    def _has(self, tier: Tier, sources: Slots, keys: Keys) -> NDArray[np.bool_]:
        """Tell whether a tier has the content of each of these slots, whose keys are given, too."""
        slots, identities = tier.find_many(keys), self._contents.many_identities
        is_same: NDArray[np.bool_] = (slots != NOBODY) & (identities[slots] == identities[sources])
        return is_same

    def _forget_others(self, slots: Slots) -> None:
        """Drop what has the keys of new blocks: its parent is gone for good, or the keys collide."""
        slots = slots[slots != NOBODY]
        if slots.size:
            self.drop(slots.tolist())

    def take_saves(self) -> list[Save]:
        """Return the saves since the last call, whose slots are held until they are `saved`.

        In each of the groups that were saved together, the head comes last.
        """
        saves, self._saves = self._saves, []
        return saves

    def saved(self, saves: Sequence[Save]) -> list[Write]:
        """End the holds of saves that are done; return what is to be written to the disk, after `take_erasures`."""
        if not saves:
            return []
        host, disk, slots = self.host, self.disk, [save.slot for save in saves]
        if disk is None:
            host.release(slots)
            return []
        sources = np.array(slots, np.intp)
        sources = sources[self._contents.is_full(sources)]
        sources = sources[~self._has(disk, sources, host.keys(sources))]
        room = max(0, min(int(host.num_slots * DIRTY_FRACTION) - self.writing, disk.free))
        if len(sources) > room:
            self.unwritten += len(sources) - room
            sources = sources[len(sources) - room :]  # the heads
        self._forget_others(disk.find_many(host.keys(sources)))
        targets = disk.take(len(sources))
        self._erasures.difference_update(targets.tolist())
        host.hold(sources.tolist())
        self.writing += len(sources)
        writes = list(map(Write, sources.tolist(), targets.tolist(), map(self._record, sources.tolist())))
        host.release(slots)
        return writes

    def written(self, outcomes: Sequence[Written]) -> None:
        """Name the blocks that have come to the disk; forget the slots of all others."""
        if not outcomes:
            return
        host, disk, contents = self.host, self.disk, self._contents
        assert disk is not None
        self.writing -= len(outcomes)
        sources = np.array([write.source for write, _ in outcomes], np.intp)
        slots = np.array([write.slot for write, _ in outcomes], np.intp)
        keys = host.keys(sources)
        is_valid = np.array([done for _, done in outcomes]) & contents.is_full(sources)
        is_valid &= disk.find_many(keys) == NOBODY
        if is_valid.any():
            valid = slots[is_valid][::-1]  # heads first
            contents.copy(sources[is_valid][::-1], valid)
            disk.name(valid, keys[is_valid][::-1])
        self._erasures.update(slots[~is_valid].tolist())
        host.release(sources.tolist())
        disk.release(slots.tolist())

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
        for tier, own in self._by_tier(slots):
            tier.hold(own)

    def release(self, slots: Sequence[int], *, loaded: bool) -> None:
        """End the holds of slots in the order of a prompt. `loaded`: the pool has their contents again."""
        for tier, own in self._by_tier(slots):
            tier.release(own[::-1], next_to_go=loaded and tier is self.host)

    def _by_tier(self, slots: Sequence[int]) -> Iterator[tuple[Tier, list[int]]]:
        for tier in self.tiers:
            own = [slot for slot in slots if slot in tier]
            if own:
                yield tier, own

    def release_read(self, slots: Sequence[int]) -> None:
        """End the holds of slots that a neighbour has read, in the order of a prompt.

        The prompt goes on there, so its own slots are the next to go; those before a fork are for other prompts, too.
        """
        nexts = self._contents.next_identities
        shared = max((place + 1 for place, slot in enumerate(slots) if nexts[slot] == SEVERAL), default=0)
        self.release(slots[:shared], loaded=False)
        self.release(slots[shared:], loaded=True)

    def drop(self, slots: Sequence[int]) -> None:
        """Forget slots whose KV turned out to be something else, or that are in the way."""
        named = [slot for slot in slots if self._contents.filled[slot]]
        for tier, own in self._by_tier(named):
            tier.drop(np.array(own, np.intp))
            if tier is self.disk:
                self._erasures.update(own)

    def clear(self) -> None:
        """Forget everything; the contents, and the disk itself, are cleared elsewhere, after this."""
        self._erasures.clear()
        for tier in self.tiers:
            tier.clear()

    def take_erasures(self) -> list[int]:
        """Return the disk's slots that have been forgotten, so that a restart does not find them.

        One that is still read comes later.
        """
        if not self._erasures:
            return []
        assert self.disk is not None
        ready = [slot for slot in self._erasures if not self.disk.is_held(slot)]
        self._erasures.difference_update(ready)
        return ready

    def check(self) -> None:
        """Verify every invariant; AssertionError says which one does not hold."""
        for tier in self.tiers:
            tier.check()
        known: dict[int, int] = {}
        for slot in range(len(self._contents.identity)):
            if self._contents.filled[slot] == self._contents.block_size and self._contents.parent[slot] != NOT_NAMED:
                first = known.setdefault(self._contents.identity[slot], slot)
                self._contents.check_copies(first, [slot])
