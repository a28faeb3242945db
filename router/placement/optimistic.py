"""Blocks routed to a replica and not yet confirmed by its events: an overlay on the index, never part of it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import count, repeat
from typing import NamedTuple

from router.placement.holders import Holders

QUEUE_MARGIN = 2.0  # actual waits occasionally reach this multiple of the estimate


def awaited_s(ttl_s: float, ttft_s: float, most_ttft_s: float = math.inf) -> float:
    """Seconds to wait for a prompt's events, given the expected and the longest time to its first token."""
    return ttl_s + QUEUE_MARGIN * min(ttft_s, most_ttft_s)


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
        self._latest_s = -math.inf  # of all deadlines

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
        """Forget the keys due by now."""
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
