"""Our waiting prompts at a replica that computes them by rank, to find those that a new one would overtake."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from itertools import accumulate
from math import inf
from typing import NamedTuple


class Later(NamedTuple):
    """The prompts, and their tokens, that a new prompt would overtake."""

    prompts: int  # those that may complain: tenants beyond their share stand back for others anyway
    tokens: float


NONE_LATER = Later(0, 0.0)


class _Position(NamedTuple):
    rank_s: float
    id: int
    tokens: float
    stands_back: bool


class QueuePositions:
    """Waiting prompts by rank; the one being computed does not wait, and follows from the ranks."""

    def __init__(self) -> None:
        self.waiting: list[_Position] = []  # sorted by rank
        self._computed: int | None = None  # the id of the one that has its position
        self._by_id: dict[int, _Position] = {}  # waiting prompts
        # Running sums of their tokens, and of those that do not stand back; None: to be added up anew.
        self._sums: tuple[Sequence[float], Sequence[int]] | None = None

    def __len__(self) -> int:
        return len(self.waiting)

    def add(self, request_id: int, rank_s: float, tokens: float, *, stands_back: bool = False) -> None:
        if self._computed is None:
            self._computed = request_id
            return
        position = self._by_id[request_id] = _Position(rank_s, request_id, tokens, stands_back)
        insort(self.waiting, position)
        self._sums = None

    def discard(self, request_id: int) -> None:
        """Remove a prompt that is computed, or never will be."""
        if request_id == self._computed:
            self._computed = self._take(0).id if self.waiting else None
        elif request_id in self._by_id:
            self._take(bisect_left(self.waiting, self._by_id[request_id]))

    def _take(self, place: int) -> _Position:
        position = self.waiting.pop(place)
        del self._by_id[position.id]
        self._sums = None
        return position

    def clear(self) -> None:
        self.waiting.clear()
        self._by_id.clear()
        self._computed = self._sums = None

    def later_than(self, rank_s: float) -> Later:
        if not self.waiting or self.waiting[-1].rank_s <= rank_s:
            return NONE_LATER
        if self._sums is None:
            tokens = accumulate((position.tokens for position in self.waiting), initial=0.0)
            prompts = accumulate((not position.stands_back for position in self.waiting), initial=0)
            self._sums = list(tokens), list(prompts)
        tokens_to, prompts_to = self._sums
        before = bisect_right(self.waiting, (rank_s, inf))
        return Later(prompts_to[-1] - prompts_to[before], tokens_to[-1] - tokens_to[before])

    def check(self) -> None:
        assert self.waiting == sorted(self._by_id.values())
        assert self._computed is not None or not self.waiting
        assert self._computed not in self._by_id
