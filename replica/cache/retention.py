"""Blocks that are given up last: marked ones, each for a time after its last use, within a share of the pool.

A mark never refuses a block to a request that needs room. While a request uses the block, no time passes for the mark.

    mark      only what a request uses, at its end
    wait      the last request that uses it has ended: its time begins
    use       a request uses it again
    end       there is no other block, or its time is over: it becomes a block like any other

A tenant (the beginning of a cache salt, by `api.retention.tenant_of`; all without one together) has a share of the
marks. To mark more, it loses those of its own that would end soonest, and never another tenant's. Pure: the owner tells
the time.
"""

from math import inf

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from replica.cache.names import Slots

AT_ONCE = 32  # blocks to give up under pressure: finding the oldest looks at all

NO_BLOCKS = np.zeros(0, np.intp)


class Tenant(Struct):
    number: int
    marks: int = 0


class Retention:
    """At most `limit` marks, and `tenant_limit` of one tenant, on `num_blocks` blocks."""

    def __init__(self, num_blocks: int, limit: int = 0, tenant_limit: int = 0) -> None:
        self.at_once = AT_ONCE
        self.limit = limit
        self.tenant_limit = min(limit, tenant_limit)
        self.marked = 0
        self.idle = 0  # marked blocks that no request uses
        self.refused = 0  # marks for which there was no room
        self.now_s = 0.0
        size = num_blocks if limit else 0
        self._ttl_s = np.zeros(size)  # 0: not marked
        self._deadline_s = np.full(size, inf)  # inf: not marked, or in use
        self._turn = np.zeros(size, np.int64)  # among equal deadlines
        self._owner = np.zeros(size, np.int32)  # the number of its tenant
        self._tenants: dict[str | None, Tenant] = {}  # those that have marks
        self._names: dict[int, str | None] = {}
        self._last_turn = self._last_number = 0
        self._earliest_s = inf  # no deadline is earlier

    def mark(self, slots: Slots, tenant: str | None, ttl_s: float) -> Slots:
        """Mark blocks in use, the first ones if there is no room for all; return the idle ones that lose theirs."""
        if not self.limit:
            return NO_BLOCKS
        known = slots[self._ttl_s[slots] > 0]
        self._ttl_s[known] = np.maximum(self._ttl_s[known], ttl_s)
        new = slots[self._ttl_s[slots] == 0]
        own = self._tenants.get(tenant)
        room = min(self.limit - self.marked, self.tenant_limit - (own.marks if own else 0))
        displaced = NO_BLOCKS
        if len(new) > room and own is not None:
            before = np.flatnonzero((self._owner == own.number) & (self._deadline_s < self.now_s + ttl_s))
            displaced = self._in_order(before)[: len(new) - room]
            self._drop(displaced)
            room += len(displaced)
        self.refused += max(0, len(new) - room)
        marked = new[:room]
        if marked.size:
            own = self._tenants.get(tenant)  # gone if it has lost all its marks
            if own is None:
                self._last_number += 1
                own = self._tenants[tenant] = Tenant(self._last_number)
                self._names[own.number] = tenant
            own.marks += len(marked)
            self.marked += len(marked)
            self._ttl_s[marked] = ttl_s
            self._owner[marked] = own.number
        return displaced

    def is_marked(self, slots: Slots) -> NDArray[np.bool_]:
        marked: NDArray[np.bool_] = self._ttl_s[slots] > 0
        return marked

    def wait(self, slots: Slots) -> None:
        """Begin the time of marked blocks that are no longer used; the first of them are given up first."""
        deadlines = self.now_s + self._ttl_s[slots]
        self._deadline_s[slots] = deadlines
        self._turn[slots] = np.arange(self._last_turn + 1, self._last_turn + 1 + len(slots))
        self._last_turn += len(slots)
        self.idle += len(slots)
        self._earliest_s = min(self._earliest_s, float(deadlines.min(initial=inf)))

    def use(self, slots: Slots) -> Slots:
        """Stop the time of the idle blocks among these; return the others."""
        is_idle = self._deadline_s[slots] < inf
        idle = slots[is_idle]
        self._deadline_s[idle] = inf
        self.idle -= len(idle)
        return slots[~is_idle]

    def first_to_go(self, count: int) -> Slots:
        """So many idle blocks or a few more, first those whose marks would end soonest."""
        return self.order()[: max(count, self.at_once)]

    def expire(self, now_s: float) -> Slots:
        """Tell the time; return the blocks whose time is over, which are no longer marked."""
        self.now_s = now_s
        if now_s < self._earliest_s:
            return NO_BLOCKS
        slots = self._in_order(np.flatnonzero(self._deadline_s <= now_s))
        self._drop(slots)
        self._earliest_s = float(self._deadline_s.min(initial=inf))
        return slots

    def end(self, slots: Slots) -> Slots:
        """Drop the marks of these; return the idle ones."""
        if not self.limit:
            return NO_BLOCKS
        slots = slots[self._ttl_s[slots] > 0]
        idle = self._in_order(slots[self._deadline_s[slots] < inf])
        self._drop(slots)
        return idle

    def order(self) -> Slots:
        """Idle blocks in the order in which they are given up."""
        return self._in_order(np.flatnonzero(self._deadline_s < inf)) if self.idle else NO_BLOCKS

    def _in_order(self, slots: Slots) -> Slots:
        ordered: Slots = slots[np.lexsort((self._turn[slots], self._deadline_s[slots]))]
        return ordered

    def _drop(self, slots: Slots) -> None:
        self.marked -= len(slots)
        self.idle -= int(np.count_nonzero(self._deadline_s[slots] < inf))
        self._ttl_s[slots] = 0
        self._deadline_s[slots] = inf
        numbers, counts = np.unique(self._owner[slots], return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            tenant = self._tenants[self._names[number]]
            tenant.marks -= count
            if not tenant.marks:
                del self._tenants[self._names.pop(number)]

    def blocks(self) -> Slots:
        """All marked blocks."""
        return np.flatnonzero(self._ttl_s)

    def clear(self) -> None:
        self._drop(self.blocks())

    def check(self) -> None:
        """Verify every invariant; AssertionError says which one does not hold."""
        marked, is_idle = self._ttl_s > 0, self._deadline_s < inf
        assert self.marked == int(marked.sum()) <= self.limit, f"{self.marked} marks, of {self.limit} at most"
        assert self.idle == int(is_idle.sum()), f"{self.idle} are counted as idle, {int(is_idle.sum())} are"
        assert not (is_idle & ~marked).any(), "a block waits without a mark"
        assert self._deadline_s.min(initial=inf) >= self._earliest_s, "a deadline is earlier than the earliest"
        assert self._names == {own.number: name for name, own in self._tenants.items()}, "a tenant has two numbers"
        for own in self._tenants.values():
            count = int(np.count_nonzero(marked & (self._owner == own.number)))
            assert own.marks == count, f"a tenant has {count} marks, {own.marks} are counted"
            assert 0 < count <= self.tenant_limit, f"a tenant has {count} marks, of {self.tenant_limit} at most"
        assert sum(own.marks for own in self._tenants.values()) == self.marked, "a mark is nobody's"
