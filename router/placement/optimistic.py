"""What was routed to a replica and is not confirmed by its events yet: an overlay on the index, never part of it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import count, repeat
from typing import NamedTuple

from router.placement.holders import Holders

QUEUE_MARGIN = 2.0  # waits turn out so much longer than estimated now and then


def awaited_s(ttl_s: float, ttft_s: float, most_ttft_s: float = math.inf) -> float:
    """How long to wait for the events of a prompt whose first token is expected so late, and is waited for so long."""
    return ttl_s + QUEUE_MARGIN * min(ttft_s, most_ttft_s)


class Entry(NamedTuple):
    """Why a key counts as held."""

    deadline_s: float
    owner: int  # who added it last


class Optimistic:
    """Keys that count as held until events say so, or until their deadline.

    `held` is what the events say: keys that a replica holds already get no entry, as no event would confirm them.
    """

    def __init__(self, held: Mapping[int, int] | None = None) -> None:
        self.holders = Holders()
        self._held = held if held is not None else {}
        self._entries: dict[int, dict[int, Entry]] = {}  # slot -> key -> entry
        # What was added, by deadline. A key of it may be gone since, or have been added again with a later one.
        self._due: list[tuple[float, int, int, list[int]]] = []
        self._added = count()
        self._latest_s = -math.inf  # of all deadlines

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))

    def add(self, slot: int, keys: Sequence[int], deadline_s: float) -> int:
        """The number by which they can be withdrawn."""
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
        """The replica's events say that it holds them."""
        entries = self._entries.get(slot)
        if entries:
            self._forget(slot, [key for key in keys if key in entries])

    def withdraw(self, slot: int, keys: Iterable[int], owner: int) -> None:
        """They were added under this number, and will not be stored; what was added again since stays."""
        entries = self._entries.get(slot)
        if entries:
            self._forget(slot, [key for key in keys if key in entries and entries[key].owner == owner])

    def drop(self, slot: int) -> None:
        self._forget(slot, list(self._entries.get(slot, ())))

    def expire(self, now_s: float) -> None:
        """Forgets what was due by now."""
        while self._due and self._due[0][0] <= now_s:
            _, _, slot, keys = heappop(self._due)
            entries = self._entries.get(slot)
            if entries:
                self._forget(slot, [key for key in keys if key in entries and entries[key].deadline_s <= now_s])

    def check(self) -> None:
        """Raises AssertionError if any invariant is broken."""
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
