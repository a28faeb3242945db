"""How likely it is that something will be asked for again that nobody has asked for in a while; learned as it goes.

Told of pages (`router.placement.ages`), it answers for any time of rest by the gaps between two uses of a page.
"""

from array import array
from collections.abc import Iterable
from itertools import accumulate
from math import inf, log2

BINS = 64  # thirds of an octave from SHORTEST_S on: gaps of up to six hours
SHORTEST_S = 0.01
MOST_PAGES = 2**18  # whose last use is known, whether or not anybody has them cached; 16 bytes each, taken at once
FADES_EVERY = 50_000  # pages
KEPT = 0.7
RENEWED = 1 / 256  # more uses than at the last count of chances, before they are counted anew


class Reuse:
    """One for all replicas: where a prompt was sent says nothing about whether it comes again.

    Last uses stand in a table of pairs. A page has its place in one of a pair, and a new one takes that which was used
    longer ago: nearly the order of an LRU, for a sixth of its memory, which does not grow.
    """

    def __init__(self) -> None:
        self._pages = array("Q", bytes(8 * MOST_PAGES))
        self._last_s = array("d", [-inf]) * MOST_PAGES
        self._known = 0
        self._gaps = [0.0] * BINS  # how many uses came so long after the one before
        self._uses = 0.0
        self._until_fading = FADES_EVERY
        self._chances = [0.0] * BINS
        self._renewed_at = 0.0  # when there are so many uses

    def __len__(self) -> int:
        """Pages that are known."""
        return self._known

    def used(self, pages: Iterable[int], now_s: float) -> None:
        """Note that these keys of pages are asked for now."""
        known, last_s, gaps, uses = self._pages, self._last_s, self._gaps, 0
        for page in pages:
            place = page % MOST_PAGES
            if known[place] != page:
                other = place ^ 1
                if known[other] == page or last_s[other] < last_s[place]:
                    place = other
            before_s = last_s[place]
            if before_s == -inf:
                self._known += 1
            elif known[place] == page:
                gaps[_bin(now_s - before_s)] += 1
            known[place] = page
            last_s[place] = now_s
            uses += 1
        self._uses += uses
        self._until_fading -= uses
        if self._until_fading <= 0:
            self._fade()

    def chance(self, idle_s: float) -> float:
        """That a page comes again which nobody has asked for in so long."""
        if self._uses >= self._renewed_at:
            self._renew()
        return self._chances[_bin(idle_s)]

    def _fade(self) -> None:
        self._until_fading = FADES_EVERY
        self._uses *= KEPT
        self._gaps = [uses * KEPT for uses in self._gaps]
        self._renewed_at = 0.0

    def _renew(self) -> None:
        """Of the uses that were not followed by another one within a time, the part that was followed later."""
        sooner = list(accumulate(self._gaps))
        again = sooner[-1]
        self._chances = [
            min(1.0, (again - before) / (self._uses - before)) if self._uses - before >= 1 else 0.0 for before in sooner
        ]
        self._renewed_at = self._uses + max(1.0, RENEWED * self._uses)

    def check(self) -> None:
        assert self._known == sum(last_s > -inf for last_s in self._last_s)
        assert sum(self._gaps) <= self._uses + 1e-6
        assert all(0 <= chance <= 1 for chance in self._chances)


def _bin(gap_s: float) -> int:
    return 0 if gap_s < SHORTEST_S else min(BINS - 1, 1 + int(3 * log2(gap_s / SHORTEST_S)))
