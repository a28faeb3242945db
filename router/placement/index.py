"""The blocks that all replicas hold, in one structure: key -> mask of slots, for each medium.

Keys are not kept by slot: what feeds the index knows them anyway, and passes them to `clear`. So each holder of a
shared block costs one bit.
"""

from collections.abc import Collection, Iterable, Sequence
from functools import reduce
from heapq import heappop, heappush
from itertools import repeat
from operator import or_
from typing import TypeAlias

from msgspec import Struct

from events.resolver import Change, Cleared, Stored
from router.placement.holders import Holders, slots_of
from router.placement.optimistic import Optimistic

GPU = "GPU"

# Slot -> leading blocks of the prompt; slots that hold none are absent.
Matched: TypeAlias = dict[int, int]


class Matches(Struct, frozen=True, gc=False):
    """Leading blocks of a prompt, by slot. Equal parts may be the same object: do not change them."""

    gpu: Matched  # in GPU memory, by events and optimistic entries
    lower: Matched  # in any medium together
    sure: Matched  # in GPU memory, by events alone


class PrefixIndex:
    """The index; a slot is its small number for a replica, and freed slots are used again."""

    def __init__(self) -> None:
        self._media: dict[str, Holders] = {GPU: Holders()}  # others only while a slot holds a block there
        self._blocks: dict[int, dict[str, int]] = {}  # slot -> medium -> blocks
        self._free: list[int] = []
        self.optimistic = Optimistic(self._media[GPU].masks)

    # ---- replicas

    def add(self) -> int:
        slot = heappop(self._free) if self._free else len(self._blocks)
        self._blocks[slot] = {}
        return slot

    def drop(self, slot: int) -> None:
        """Forget a replica. If a feed follows it, call `Feeds.leave` first, or this scans the whole index."""
        self.clear(slot)
        self.optimistic.drop(slot)
        del self._blocks[slot]
        heappush(self._free, slot)

    # ---- what they hold

    def apply(self, slot: int, change: Change) -> None:
        if isinstance(change, Stored):
            if change.keys:
                self._add(slot, change.keys, change.medium)
            if change.medium == GPU:
                self.optimistic.confirm(slot, change.chain)
        elif isinstance(change, Cleared):
            self.clear(slot, change.held)
        else:
            self._discard(slot, change.keys, change.medium)

    def store(self, slot: int, keys: Collection[int], medium: str = GPU) -> None:
        self._add(slot, keys, medium)
        if medium == GPU:
            self.optimistic.confirm(slot, keys)

    def remove(self, slot: int, keys: Iterable[int], medium: str = GPU) -> None:
        self._discard(slot, keys, medium)

    def clear(self, slot: int, held: Iterable[tuple[str, Iterable[int]]] = ()) -> None:
        """Forget every key of the replica: those that the caller gives by medium.

        Search the whole index for any others that are still counted.
        """
        for medium, keys in held:
            self._discard(slot, keys, medium)
        for medium, blocks in list(self._blocks[slot].items()):
            if blocks:
                self._discard(slot, self._media[medium].of(slot), medium)
        self._blocks[slot].clear()

    def intern(self, keys: list[int]) -> list[int]:
        """The same keys, as the objects that other replicas use already: this halves the memory of a shared block."""
        return self._media[GPU].intern(keys)

    def _add(self, slot: int, keys: Collection[int], medium: str) -> None:
        blocks = self._blocks[slot]
        holders = self._media.get(medium)
        if holders is None:
            holders = self._media[medium] = Holders()
        blocks[medium] = blocks.get(medium, 0) + holders.add(slot, keys)

    def _discard(self, slot: int, keys: Iterable[int], medium: str) -> None:
        holders = self._media.get(medium)
        if holders is None:
            return
        blocks = self._blocks[slot]
        blocks[medium] = blocks.get(medium, 0) - holders.discard(slot, keys)
        if medium != GPU and not holders:
            del self._media[medium]

    # ---- questions

    def match(self, keys: Sequence[int], slots: int) -> Matches:
        """Count the leading blocks of a prompt that each of these replicas holds (`slots`: a mask)."""
        held = _masks(self._media[GPU].masks, keys)
        sure = hoped = leading(held, slots)
        more = self.optimistic.holders.masks
        if more:
            routed = _masks(more, keys)
            hoped = extended(sure, held, routed, slots)
            held = list(map(or_, held, routed)) if len(self._media) > 1 else held
        lower = hoped
        for medium, holders in self._media.items():
            if medium != GPU:
                below = _masks(holders.masks, keys)
                lower = extended(lower, held, below, slots)
                held = list(map(or_, held, below))
        return Matches(hoped, lower, sure)

    def holders(self, keys: Sequence[int]) -> list[int]:
        """For each block, the mask of its holders in any medium, by events alone."""
        held = [0] * len(keys)
        for holders in self._media.values():
            held = list(map(or_, held, _masks(holders.masks, keys)))
        return held

    def blocks(self, slot: int) -> dict[str, int]:
        """Number of blocks by medium."""
        return {medium: blocks for medium, blocks in self._blocks[slot].items() if blocks}

    def bytes_used(self) -> int:
        """An estimate, without the resolvers' memory."""
        return sum(holders.bytes_used() for holders in self._media.values())

    def check(self) -> None:
        """Raise AssertionError if any invariant is broken; optimistic entries have a check of their own."""
        assert sorted([*self._blocks, *self._free]) == list(range(len(self._blocks) + len(self._free))), (
            f"slots {sorted(self._blocks)} are in use and {sorted(self._free)} free"
        )
        for medium, holders in self._media.items():
            assert holders or medium == GPU, f"nobody holds anything in {medium}"
            assert 0 not in holders.masks.values(), f"{medium}: a key that nobody holds"
            counted = {slot: blocks[medium] for slot, blocks in self._blocks.items() if blocks.get(medium)}
            assert holders.counts() == counted, f"{medium}: {holders.counts()} blocks by slot, {counted} counted"


def leading(masks: Iterable[int], slots: int) -> Matched:
    """Count, for each slot, the leading masks that have its bit.

    Look at every block, as a replica may have evicted one in the middle: skipping ahead would miss that.
    """
    matched: Matched = {}
    depth = 0
    last = -1
    alive = slots
    for mask in masks:
        if mask != last:  # blocks of one chain mostly have the same holders
            last = mask
            gone = alive & ~mask
            if gone:
                if depth:
                    for slot in slots_of(gone):
                        matched[slot] = depth
                alive ^= gone
                if not alive:
                    return matched
        depth += 1
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


def _masks(masks: dict[int, int], keys: Iterable[int]) -> list[int]:
    return list(map(masks.get, keys, repeat(0)))
