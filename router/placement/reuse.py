"""The probability that an idle page will be used again, learned from the traffic.

It follows, for any idle time, from the gaps between two uses of a page (`router.placement.ages`).
"""

from array import array
from collections.abc import Iterable
from itertools import accumulate
from math import inf, log2

BINS = 64  # thirds of an octave from SHORTEST_S on: gaps of up to six hours
SHORTEST_S = 0.01
MOST_PAGES = 2**18  # with a known last use, cached or not; 16 bytes each, allocated at once
FADES_EVERY = 50_000  # pages
KEPT = 0.7
RENEWED = 1 / 256  # more uses than at the last count of chances, before they are counted anew


class Reuse:
    """Reuse in all replicas together, as a prompt's reuse does not depend on its replica.

    Last uses are in a table of pairs. Each page belongs to one pair, and a new page replaces the older entry there:
    nearly the order of an LRU, for a sixth of its memory, which does not grow.
    """

    def __init__(self) -> None:
        self._pages = array("Q", bytes(8 * MOST_PAGES))
        self._last_s = array("d", [-inf]) * MOST_PAGES
        self._known = 0
        self._gaps = [0.0] * BINS  # uses by the time since the one before
        self._uses = 0.0
        self._until_fading = FADES_EVERY
        self._chances = [0.0] * BINS
        self._renewed_at = 0.0  # number of uses at which the chances are computed again

    def __len__(self) -> int:
        """Number of known pages."""
        return self._known

    def used(self, pages: Iterable[int], now_s: float) -> None:
        """Note that these pages are used now."""
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
        """P(used again, given this idle time)."""
        if self._uses >= self._renewed_at:
            self._renew()
        return self._chances[_bin(idle_s)]

    def _fade(self) -> None:
        self._until_fading = FADES_EVERY
        self._uses *= KEPT
        self._gaps = [uses * KEPT for uses in self._gaps]
        self._renewed_at = 0.0

    def _renew(self) -> None:
        """Compute P(used again later, given not used again yet), per bin of idle time."""
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
