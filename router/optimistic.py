"""What was routed to a replica and is not confirmed by its events yet: an overlay on the index, never part of it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import count, repeat

from router.holders import Holders

QUEUE_MARGIN = 2.0  # waits turn out so much longer than estimated now and then


def awaited_s(ttl_s: float, ttft_s: float) -> float:
    """How long to wait for the events of a prompt whose first token is expected so late."""
    return ttl_s + QUEUE_MARGIN * ttft_s


class Optimistic:
    """Keys that count as held until events say so, or until their deadline.

    `held` is what the events say: keys that a replica holds already get no entry, as no event would confirm them.
    """

    def __init__(self, held: Mapping[int, int] | None = None) -> None:
        self.holders = Holders()
        self._held = held if held is not None else {}
        self._deadlines: dict[int, dict[int, float]] = {}  # slot -> key -> deadline
        # What was added, by deadline. A key of it may be gone since, or have been added again with a later one.
        self._due: list[tuple[float, int, int, list[int]]] = []
        self._added = count()
        self._latest_s = -math.inf  # of all deadlines

    def __len__(self) -> int:
        return sum(map(len, self._deadlines.values()))

    def add(self, slot: int, keys: Sequence[int], deadline_s: float) -> None:
        bit = 1 << slot
        awaited = [key for key, mask in zip(keys, map(self._held.get, keys, repeat(0)), strict=True) if not mask & bit]
        if not awaited:
            return
        deadlines = self._deadlines.setdefault(slot, {})
        if deadline_s >= self._latest_s:
            deadlines.update(dict.fromkeys(awaited, deadline_s))
            self._latest_s = deadline_s
        else:
            for key in awaited:
                deadlines[key] = max(deadline_s, deadlines.get(key, deadline_s))
        self.holders.add(slot, awaited)
        heappush(self._due, (deadline_s, next(self._added), slot, awaited))

    def confirm(self, slot: int, keys: Iterable[int]) -> None:
        """The replica's events say that it holds them."""
        deadlines = self._deadlines.get(slot)
        if deadlines:
            self._forget(slot, [key for key in keys if key in deadlines])

    def withdraw(self, slot: int, keys: Iterable[int], deadline_s: float) -> None:
        """They were added with this deadline, and will not be stored; what was added again since stays."""
        deadlines = self._deadlines.get(slot)
        if deadlines:
            self._forget(slot, [key for key in keys if deadlines.get(key) == deadline_s])

    def drop(self, slot: int) -> None:
        self._forget(slot, list(self._deadlines.get(slot, ())))

    def expire(self, now_s: float) -> None:
        """Forgets what was due by now."""
        while self._due and self._due[0][0] <= now_s:
            _, _, slot, keys = heappop(self._due)
            deadlines = self._deadlines.get(slot)
            if deadlines:
                self._forget(slot, [key for key in keys if deadlines.get(key, math.inf) <= now_s])

    def check(self) -> None:
        """Raises AssertionError if any invariant is broken."""
        counted = {slot: len(deadlines) for slot, deadlines in self._deadlines.items()}
        assert self.holders.counts() == counted, f"{self.holders.counts()} keys by slot, deadlines of {counted}"
        for slot, deadlines in self._deadlines.items():
            assert deadlines, f"slot {slot} waits for nothing"
            due = {(deadline_s, key) for deadline_s, _, own, keys in self._due if own == slot for key in keys}
            never = {(deadline_s, key) for key, deadline_s in deadlines.items()} - due
            assert not never, f"slot {slot}: {never} will never expire"

    def _forget(self, slot: int, keys: list[int]) -> None:
        if not keys:
            return
        deadlines = self._deadlines[slot]
        for key in keys:
            deadlines.pop(key, None)
        self.holders.discard(slot, keys)
        if not deadlines:
            del self._deadlines[slot]
