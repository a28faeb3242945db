"""The slot of each block key: a hash table in flat arrays, without a Python object for any entry.

A bucket is a list of slots: `_heads[bucket]` is the first, `_after[slot]` the next, NOBODY ends it. Every array is seen
in two ways: `array` is faster for one entry, numpy for many. Copies are beside it: further slots with the same key.
"""

import secrets
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Keys: TypeAlias = NDArray[np.uint64]
Slots: TypeAlias = NDArray[np.intp]

NOBODY = -1
WORD = 2**64 - 1


class Names:
    """`keys[slot]` is the slot's key, if it is in the table or a copy of one that is."""

    def __init__(self, slots: int) -> None:
        bits = max(2, (4 * slots - 1).bit_length())  # enough buckets that few hold two
        self._shift = 64 - bits
        self._multiplier = secrets.randbits(64) | 1  # secret: whoever could choose buckets could crowd one
        self._heads = array("i", [NOBODY]) * (1 << bits)
        self._after = array("i", [NOBODY]) * slots
        self.keys = array("Q", bytes(8 * slots))
        self._many_heads = np.frombuffer(self._heads, np.int32)
        self._many_after = np.frombuffer(self._after, np.int32)
        self.many_keys = np.frombuffer(self.keys, np.uint64)
        self._many_multiplier = np.uint64(self._multiplier)
        self._many_shift = np.uint64(self._shift)
        self.copies: dict[int, list[int]] = {}  # each key's slots after the oldest, as they were made

    # ---- one

    def find(self, key: int) -> int:
        """The key's slot, or NOBODY."""
        slot = self._heads[self._bucket(key)]
        while slot != NOBODY and self.keys[slot] != key:
            slot = self._after[slot]
        return slot

    def add(self, key: int, slot: int) -> None:
        """The key must not be there yet."""
        bucket = self._bucket(key)
        self.keys[slot] = key
        self._after[slot] = self._heads[bucket]
        self._heads[bucket] = slot

    def remove(self, slot: int) -> None:
        """The slot must be there."""
        self._remove(slot, self._bucket(self.keys[slot]))

    def _remove(self, slot: int, bucket: int) -> None:
        before = self._heads[bucket]
        if before == slot:
            self._heads[bucket] = self._after[slot]
            return
        while self._after[before] != slot:
            before = self._after[before]
        self._after[before] = self._after[slot]

    def _bucket(self, key: int) -> int:
        return (key * self._multiplier & WORD) >> self._shift

    # ---- many

    def find_many(self, keys: Keys) -> Slots:
        slots = self._many_heads[self._buckets(keys)].astype(np.intp)
        pending = np.flatnonzero((slots != NOBODY) & (self.many_keys[slots] != keys))
        while pending.size:
            slots[pending] = after = self._many_after[slots[pending]]
            pending = pending[(after != NOBODY) & (self.many_keys[after] != keys[pending])]
        return slots

    def add_many(self, keys: Keys, slots: Slots) -> bool:
        """Return False, without a change, if a key is present already or given twice."""
        buckets = self._buckets(keys)
        heads = self._many_heads[buckets]
        shared = np.flatnonzero(heads != NOBODY)
        if shared.size and (self.find_many(keys[shared]) != NOBODY).any():
            return False
        self.many_keys[slots] = keys
        self._many_after[slots] = heads
        self._many_heads[buckets] = slots
        # Only the last of several in one bucket has become its head; the others go before it one by one.
        for index in np.flatnonzero(self._many_heads[buckets] != slots).tolist():
            key = int(keys[index])
            if self.find(key) != NOBODY:
                self._many_heads[buckets] = heads
                return False
            self.add(key, int(slots[index]))
        return True

    def remove_many(self, slots: Slots) -> None:
        """Every slot must be there."""
        buckets = self._buckets(self.many_keys[slots])
        first = self._many_heads[buckets] == slots
        self._many_heads[buckets[first]] = self._many_after[slots[first]]
        for slot, bucket in zip(slots[~first].tolist(), buckets[~first].tolist(), strict=True):
            self._remove(slot, bucket)

    def _buckets(self, keys: Keys) -> Slots:
        return (keys * self._many_multiplier >> self._many_shift).astype(np.intp)

    # ---- copies

    def add_copy(self, key: int, slot: int) -> None:
        """The key must be there."""
        self.keys[slot] = key
        self.copies.setdefault(key, []).append(slot)

    def drop_copy(self, slot: int) -> bool:
        """Drop one copy of several, which may be the oldest; False if it is the only one."""
        key = self.keys[slot]
        copies = self.copies.get(key)
        if copies is None:
            return False
        if slot in copies:
            copies.remove(slot)
        else:
            self.remove(slot)
            self.add(key, copies.pop(0))
        if not copies:
            del self.copies[key]
        return True

    # ---- all

    def clear(self) -> None:
        self._many_heads[:] = NOBODY
        self.copies.clear()

    def slots(self) -> Slots:
        """Every slot that is in the table, copies left out."""
        found = [level := self._many_heads[self._many_heads != NOBODY]]
        while level.size:
            after = self._many_after[level]
            found.append(level := after[after != NOBODY])
        return np.concatenate(found).astype(np.intp)

    def check(self) -> None:
        """Verify every invariant; AssertionError says which one does not hold."""
        first_copies = self.slots().tolist()
        assert all(self.find(self.keys[slot]) == slot for slot in first_copies), "a name is not found"
        assert all(self.copies.values()), "a key has an empty list of copies"
        there = [*first_copies, *chain.from_iterable(self.copies.values())]
        assert len(there) == len(set(there)), "a slot has two names"
        for key, copies in self.copies.items():
            assert all(self.keys[copy] == key for copy in copies), f"copies {copies} of {key:x} have another key"


class Match(NamedTuple):
    """The longest cached prefix of a chain: the blocks that hold it, and the identity of the last (0: none)."""

    blocks: list[int]
    identity: int
    refused: bool = False  # the next block's key is here, with other content
    lower: Sequence[int] = ()  # the slots of lower media that hold the blocks after these


class PartialBlock(NamedTuple):
    """The first `tokens` of a chain's next block, as the block `source` holds them."""

    source: int
    tokens: int
    adoptable: bool  # they are all that it holds, and nobody uses it: it may be taken as a hit and written on


NO_MATCH = Match([], 0)
NO_PART = PartialBlock(NOBODY, 0, adoptable=False)
