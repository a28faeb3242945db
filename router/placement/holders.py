"""The slots that hold each key, as a mask with the bits `1 << slot`."""

import math
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache, reduce
from heapq import heappop, heappush
from itertools import count, groupby, repeat
from operator import or_
from sys import getsizeof
from typing import NamedTuple, TypeAlias

# Slot -> leading blocks of the prompt; slots that hold none are absent.
Matched: TypeAlias = dict[int, int]

# Beyond this size the table of shared masks starts anew: some equal masks then exist twice, which does no harm.
SHARED_MASKS = 65_536
INT_BYTES = 48  # the memory of a 64-bit key
GONE_PLACES = 2**20  # keys remembered after their last holder has lost them, in 4 MB
GONE_STEP = 2**7  # their order is known to so many
PLACE, MARK, STEP = 44, 0xFFFF0000, 0xFFFF  # the bits of a key that are its place and its mark, and those of its step
LOOKED_UP = 32  # keys at a time: after as many that are not known, a prompt goes on with new ones


class Gone:
    """Keys that nobody holds any more, in a table of fixed size: a newer one may take an older one's place."""

    def __init__(self) -> None:
        self._table: array[int] | None = None
        self._count = 0

    def add(self, keys: Sequence[int]) -> None:
        table = self._table
        if table is None:
            table = self._table = array("I", bytes(4 * GONE_PLACES))
        self._count += len(keys)
        step = self._count // GONE_STEP & STEP
        for key in keys:
            table[key >> PLACE] = key & MARK | step

    def leading(self, keys: Sequence[int], more_blocks: int) -> tuple[int, int]:
        """Return how many of a prompt's next blocks were held once, and how many `more_blocks` would have kept.

        All before a block that was held were held, too. Memory for more blocks keeps those that went last.
        """
        table, held, kept, now, room = self._table, 0, 0, self._count // GONE_STEP, more_blocks // GONE_STEP
        for first in range(0, len(keys) if table is not None else 0, LOOKED_UP):
            assert table is not None, "else there is no range"
            entries = [
                (entry, blocks)
                for blocks, key in enumerate(keys[first : first + LOOKED_UP], first + 1)
                if not ((entry := table[key >> PLACE]) ^ key) & MARK
            ]
            if not entries:
                break
            held = entries[-1][1]
            kept += sum(now - entry & STEP < room for entry, _ in entries)
        return held, kept


class Holders:
    """The mask of every held key; a key without holders is absent."""

    __slots__ = ("_gone", "_objects", "_shared", "masks")

    def __init__(self, gone: Gone | None = None) -> None:
        self._gone = gone
        self.masks: dict[int, int] = {}
        self._shared: dict[int, int] = {}
        self._objects: dict[int, int] = {}  # objects of keys that were held already when stored again

    def __len__(self) -> int:
        return len(self.masks)

    def add(self, slot: int, keys: Collection[int]) -> int:
        """Add keys to a slot; return the number of those that it had not held before."""
        masks, bit = self.masks, 1 << slot
        if masks.keys().isdisjoint(keys):
            before = len(masks)
            masks.update(dict.fromkeys(keys, self._shared.setdefault(bit, bit)))
            return len(masks) - before
        added, last, grown, is_new = 0, -1, 0, False
        for key in keys:
            mask = masks.get(key, 0)
            if mask is not last:  # blocks of one chain mostly have the same holders
                last, grown, is_new = mask, self._share(mask | bit), not mask & bit
            masks[key] = grown
            added += is_new
        return added

    def discard(self, slot: int, keys: Iterable[int]) -> int:
        """Remove keys from a slot; return the number of those that it held."""
        masks, objects, bit = self.masks, self._objects, 1 << slot
        dropped, last, left, gone = 0, -1, 0, list[int]()
        for key in keys:
            mask = masks.get(key, 0)
            if not mask & bit:
                continue
            if mask is not last:
                last, left = mask, self._share(mask ^ bit)
            dropped += 1
            if left:
                masks[key] = left
            else:
                del masks[key]
                objects.pop(key, None)
                gone.append(key)
        if gone and self._gone is not None:
            self._gone.add(gone)
        return dropped

    def intern(self, keys: list[int]) -> list[int]:
        """The same keys as one object each, shared by all slots."""
        if self.masks.keys().isdisjoint(keys):
            return keys
        if len(self._objects) > len(self.masks):  # some were never added
            self._objects.clear()
        return list(map(self._objects.setdefault, keys, keys))

    def of(self, slot: int) -> list[int]:
        """The keys that a slot holds, in time proportional to all keys."""
        bit = 1 << slot
        return [key for key, mask in self.masks.items() if mask & bit]

    def bytes_used(self) -> int:
        """An estimate, with the objects of the keys even if others share them."""
        tables = getsizeof(self.masks) + getsizeof(self._objects) + getsizeof(self._shared)
        return tables + INT_BYTES * len(self.masks)

    def counts(self) -> dict[int, int]:
        """Keys by slot, counted one by one."""
        counted: dict[int, int] = {}
        for mask in self.masks.values():
            for slot in slots_of(mask):
                counted[slot] = counted.get(slot, 0) + 1
        return counted

    def _share(self, mask: int) -> int:
        if len(self._shared) >= SHARED_MASKS:
            self._shared.clear()
        return self._shared.setdefault(mask, mask)


@lru_cache(maxsize=4096)
def slots_of(mask: int) -> tuple[int, ...]:
    return tuple(slot for slot in range(mask.bit_length()) if mask >> slot & 1)


def leading(masks: Iterable[int], slots: int) -> Matched:
    """Count, for each slot, the leading masks that have its bit.

    Look at every block, as a replica may have evicted one in the middle: skipping ahead would miss that.
    """
    matched: Matched = {}
    depth = 0
    alive = slots
    for mask, run in groupby(masks):  # blocks of one chain mostly have the same holders
        gone = alive & ~mask
        if gone:
            if depth:
                for slot in slots_of(gone):
                    matched[slot] = depth
            alive ^= gone
            if not alive:
                return matched
        depth += len(list(run))
    if depth:
        matched.update(dict.fromkeys(slots_of(alive), depth))
    return matched


def extended(matched: Matched, held: list[int], more: list[int], slots: int) -> Matched:
    """Leading blocks of `held` and `more` together, from `matched` of `held` alone; starts at the first difference."""
    also = reduce(or_, set(more), 0) & slots
    if not also:
        return matched
    start = min(matched.get(slot, 0) for slot in slots_of(also))
    longer = leading(map(or_, held[start:], more[start:]), also)
    return matched | {slot: start + blocks for slot, blocks in longer.items()} if longer else matched


# ---- blocks routed to a replica, and not yet confirmed by its events


class Entry(NamedTuple):
    """An unconfirmed key: its deadline and its latest `add`."""

    deadline_s: float
    owner: int  # the number of the latest `add`


class Optimistic:
    """Keys that count as held until events say so, or until their deadline.

    `held` has the masks by events: keys that a replica holds already get no entry, as no event would confirm them.
    """

    def __init__(self, held: Mapping[int, int] | None = None) -> None:
        self.holders = Holders()
        self._held = held if held is not None else {}
        self._entries: dict[int, dict[int, Entry]] = {}  # slot -> key -> entry
        # Additions by deadline. Their keys may be gone since, or have been added again with a later deadline.
        self._due: list[tuple[float, int, int, list[int]]] = []
        self._added = count()
        self._latest_s = -math.inf  # the latest of all deadlines

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))

    def add(self, slot: int, keys: Sequence[int], deadline_s: float) -> int:
        """Add keys until a deadline; return the number to withdraw them by."""
        owner = next(self._added)
        bit = 1 << slot
        awaited = [key for key, mask in zip(keys, map(self._held.get, keys, repeat(0)), strict=True) if not mask & bit]
        if not awaited:
            return owner
        entries, entry = self._entries.setdefault(slot, {}), Entry(deadline_s, owner)
        if deadline_s >= self._latest_s:
            entries.update(dict.fromkeys(awaited, entry))
            self._latest_s = deadline_s
        else:
            for key in awaited:
                later = entries.get(key)
                entries[key] = Entry(later.deadline_s, owner) if later and later.deadline_s > deadline_s else entry
        self.holders.add(slot, awaited)
        heappush(self._due, (deadline_s, owner, slot, awaited))
        return owner

    def confirm(self, slot: int, keys: Iterable[int]) -> None:
        """Remove entries of keys that the replica's events report as held."""
        entries = self._entries.get(slot)
        if entries:
            self._forget(slot, [key for key in keys if key in entries])

    def withdraw(self, slot: int, keys: Iterable[int], owner: int) -> None:
        """Remove keys of this number that will not be stored; keys added again since stay."""
        entries = self._entries.get(slot)
        if entries:
            self._forget(slot, [key for key in keys if key in entries and entries[key].owner == owner])

    def drop(self, slot: int) -> None:
        self._forget(slot, list(self._entries.get(slot, ())))

    def expire(self, now_s: float) -> None:
        while self._due and self._due[0][0] <= now_s:
            _, _, slot, keys = heappop(self._due)
            entries = self._entries.get(slot)
            if entries:
                self._forget(slot, [key for key in keys if key in entries and entries[key].deadline_s <= now_s])

    def check(self) -> None:
        """Raise AssertionError if any invariant is broken."""
        counted = {slot: len(entries) for slot, entries in self._entries.items()}
        assert self.holders.counts() == counted, f"{self.holders.counts()} keys by slot, deadlines of {counted}"
        for slot, entries in self._entries.items():
            assert entries, f"slot {slot} waits for nothing"
            due = {(deadline_s, key) for deadline_s, _, own, keys in self._due if own == slot for key in keys}
            never = {(entry.deadline_s, key) for key, entry in entries.items()} - due
            assert not never, f"slot {slot}: {never} will never expire"

    def _forget(self, slot: int, keys: list[int]) -> None:
        if not keys:
            return
        entries = self._entries[slot]
        for key in keys:
            entries.pop(key, None)
        self.holders.discard(slot, keys)
        if not entries:
            del self._entries[slot]
