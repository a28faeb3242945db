"""Requests that no replica has room for: a bounded queue by priority, without starvation.

An entry's rank is fixed when it comes: its arrival, later by STEP_S for each step of its priority. So all of them age
alike, and only entries that come within STEP_S times the difference of the priorities overtake one. The queue is a
sorted list: a place is found in O(log n), and n is small enough that moving pointers does not count.
"""

import math
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import count
from typing import Generic, TypeAlias, TypeVar

from msgspec import Struct

from router.placement.cost import NONE_TRIED, Candidate, obstacles

STEP_S = 10.0  # one step of priority is worth an arrival this much earlier
REMEMBERED_TAKES = 64
IDLE_S = 5.0  # after this long without a take an empty queue forgets how fast it was
LEAST_WAIT_S, MAX_WAIT_S = 1.0, 60.0

Entry = TypeVar("Entry", bound=Hashable)
Place: TypeAlias = tuple[float, int]


class Ticket(Struct, frozen=True, eq=False):
    group: str
    place: Place  # rank, number; that of a begun answer is negative
    deadline: Place  # deadline, number
    tokens: int  # 0: not known
    tried: frozenset[str]  # replicas that it does not wait for
    not_before_s: float
    stands_back: bool


class Waiting(Generic[Entry]):
    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise ValueError(f"capacity is {capacity}; use 0 (nobody waits) or more")
        self.capacity = capacity
        self.groups: Counter[str] = Counter()  # number of waiting entries by group
        self._tickets: dict[Entry, Ticket] = {}
        self._places: list[Place] = []  # the best is first
        self._deadlines: list[Place] = []
        self._entries: dict[int, Entry] = {}  # tickets by number
        self._numbers = count(1)
        self._taken_s: deque[float] = deque(maxlen=REMEMBERED_TAKES)  # after the time at which counting began

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._tickets

    def offer(
        self,
        entry: Entry,
        priority: float,
        now_s: float,
        deadline_s: float = float("inf"),
        *,
        since_s: float | None = None,
        group: str = "",
        tokens: int = 0,
        tried: frozenset[str] = NONE_TRIED,
        not_before_s: float = 0.0,
        stands_back: bool = False,
        begun: bool = False,
    ) -> Entry | None:
        """Queue an entry; lower priority goes first. Return the refused entry, if any: the worst or `entry`.

        `since_s`: its first arrival, if it has waited before or was begun; it then goes before a new entry of its rank.
        `begun`: a part of its answer is at the client; it goes before all others of its rank.
        `group`: entries of one group wait for the same replicas, except those that they have tried.
        """
        if entry in self._tickets:
            raise ValueError(f"{entry!r} already waits; cancel it first")
        came_s = now_s if since_s is None else since_s
        rank = came_s + STEP_S * priority
        refused, number = None, next(self._numbers) * (-1 if begun else 1)
        if len(self._places) >= self.capacity:
            worst, last = self._places[-1] if self._places else (-math.inf, 0)
            if rank > worst or (rank == worst and (came_s >= now_s or last < 0 < number)):
                return entry
            refused = self._entries[last]
            self.cancel(refused)
        if not self._places and not (self._taken_s and now_s - self._taken_s[-1] < IDLE_S):
            self._taken_s.clear()
            self._taken_s.append(now_s)
        ticket = Ticket(group, (rank, number), (deadline_s, number), tokens, tried, not_before_s, stands_back)
        self.groups[group] += 1
        self._tickets[entry] = ticket
        self._entries[number] = entry
        insort(self._places, ticket.place)
        insort(self._deadlines, ticket.deadline)
        return refused

    def of(self, group: str) -> list[Entry]:
        return [entry for entry, ticket in self._tickets.items() if ticket.group == group]

    def in_order(self) -> Iterator[Entry]:
        """Entries in the order of their turns; they may be taken meanwhile."""
        for _, number in list(self._places):
            if (entry := self._entries.get(number)) is not None:
                yield entry

    def with_room(self, now_s: float, candidates_of: Callable[[str], Sequence[Candidate]]) -> Iterator[Entry]:
        """Take out in order, one by one, the entries that a replica of their group can take now.

        Entries without room are passed over. Place each before the next is asked for.
        """
        groups = {group for group in self.groups if None in obstacles(candidates_of(group))}
        too_many: dict[tuple[str, frozenset[str], bool], int] = {}  # fewest tokens without room
        for entry in self.in_order():
            if not groups:
                return
            ticket = self._tickets[entry]
            kind = ticket.group, ticket.tried, ticket.stands_back
            if ticket.group not in groups or ticket.not_before_s > now_s:
                continue
            if ticket.tokens >= too_many.get(kind, ticket.tokens + 1):
                continue
            candidates = candidates_of(ticket.group)
            if None in obstacles(candidates, ticket.tokens, ticket.tried, stands_back=ticket.stands_back):
                self.take(now_s, entry)
                yield entry
                continue
            too_many[kind] = ticket.tokens
            if None not in obstacles(candidates):
                groups.discard(ticket.group)

    def take(self, now_s: float, entry: Entry | None = None) -> Entry | None:
        """Take out this entry, or the first in order, as there is room; None if it does not wait."""
        if entry is None:
            entry = next(self.in_order(), None)
        if entry is None or not self.cancel(entry):
            return None
        self._taken_s.append(now_s)
        return entry

    def cancel(self, entry: Entry) -> bool:
        """Take an entry out; return False if it does not wait."""
        ticket = self._tickets.pop(entry, None)
        if ticket is None:
            return False
        self.groups[ticket.group] -= 1
        if not self.groups[ticket.group]:
            del self.groups[ticket.group]
        del self._entries[ticket.place[1]]
        del self._places[bisect_left(self._places, ticket.place)]
        del self._deadlines[bisect_left(self._deadlines, ticket.deadline)]
        return True

    def expire(self, now_s: float) -> list[Entry]:
        """Take out the entries past their deadline, the earliest first."""
        gone = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            gone.append(self._entries[self._deadlines[0][1]])
            self.cancel(gone[-1])
        return gone

    def estimated_wait_s(self, now_s: float) -> float:
        """Estimate a newcomer's wait for Retry-After, from the recent pace of taken entries."""
        return min(MAX_WAIT_S, max(LEAST_WAIT_S, (len(self._places) + 1) * self._entry_s(now_s)))

    def wait_of(self, rank_s: float, now_s: float) -> float:
        """Estimate the wait of an entry of this rank; 0 while the pace is not known."""
        return (bisect_left(self._places, (rank_s, 0)) + 1) * self._entry_s(now_s)

    def _entry_s(self, now_s: float) -> float:
        """Time for each entry, by those taken lately."""
        return (now_s - self._taken_s[0]) / max(1, len(self._taken_s) - 1) if self._taken_s else 0.0

    def check(self) -> None:
        assert len(self._places) == len(self._deadlines) == len(self._tickets) == len(self._entries) <= self.capacity
        assert self.groups == Counter(ticket.group for ticket in self._tickets.values())
        assert self._places == sorted(ticket.place for ticket in self._tickets.values())
        assert self._deadlines == sorted(ticket.deadline for ticket in self._tickets.values())
        assert all(self._entries[ticket.place[1]] == entry for entry, ticket in self._tickets.items())
