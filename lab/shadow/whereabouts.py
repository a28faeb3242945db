"""Finds where requests went from the events: the replica that stores a prompt's last block has computed it. Pure."""

from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from lab.shadow.record import Record, Source
from router.placement.holders import slots_of

WITHIN_S = 60.0  # from the arrival to the end of its prefill
MOST_SOUGHT = 4096


class _Sought(NamedTuple):
    record: Record
    held: int  # mask of the replicas that had the block before
    until_s: float


class Whereabouts:
    """`seek` each request as it comes, and `settle` often: a block may be evicted soon."""

    def __init__(self, holders: Callable[[int, int], int], name_of: Callable[[int], str | None]) -> None:
        """`holders`: the mask of the replicas that have a block of this size and key; `name_of`: a slot's replica."""
        self._holders = holders
        self._name_of = name_of
        self._sought: deque[_Sought] = deque()
        self._claimed: dict[int, int] = {}  # by key: replicas that are accounted for by earlier requests
        self._waiting: Counter[int] = Counter()  # requests by key
        self._turn = 0  # among several replicas that may all have served a request

    def __len__(self) -> int:
        return len(self._sought)

    def seek(self, record: Record, now_s: float) -> None:
        """Look for the replica of a request that has just come, if its prompt fills a block."""
        if not record.keys or len(self._sought) >= MOST_SOUGHT:
            return
        key = record.keys[-1]
        self._waiting[key] += 1
        self._sought.append(_Sought(record, self._holders(record.block_tokens, key), now_s + WITHIN_S))

    def settle(self, now_s: float) -> None:
        """Note what can be told by now; after a while, that nobody has computed it."""
        for _ in range(len(self._sought)):
            one = self._sought.popleft()
            record, key = one.record, one.record.keys[-1]
            new = self._holders(record.block_tokens, key) & ~one.held & ~self._claimed.get(key, 0)
            if new:
                slot = next(iter(slots_of(new)))
                self._claimed[key] = self._claimed.get(key, 0) | 1 << slot
                self._found(record, slot, "stored")
            elif now_s >= one.until_s:
                self._give_up(one)
            else:
                self._sought.append(one)

    def end(self) -> None:
        """Decide the rest by what is known now."""
        while self._sought:
            self._give_up(self._sought.popleft())

    def _give_up(self, one: _Sought) -> None:
        """Take a replica that could serve the prompt without storing anything."""
        slots = list(slots_of(one.held | self._claimed.get(one.record.keys[-1], 0)))
        if not slots:
            self._forget(one.record)
            return
        self._turn += 1
        source: Source = "held" if len(slots) == 1 else "one of several"
        self._found(one.record, slots[self._turn % len(slots)], source)

    def _found(self, record: Record, slot: int, source: Source) -> None:
        name = self._name_of(slot)
        if name is not None:
            record.replica, record.source = name, source
        self._forget(record)

    def _forget(self, record: Record) -> None:
        key = record.keys[-1]
        self._waiting[key] -= 1
        if not self._waiting[key]:
            del self._waiting[key]
            self._claimed.pop(key, None)
