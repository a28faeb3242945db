"""The content of a replica's cache by its last use, and the loss if another prompt evicts some of it.

Counted in pages, by a sample: one block in so many stands for about PAGE_TOKENS tokens, the same one in every prompt
that has it. The cache itself is not inspected: if it evicts the least recently used first, it holds the latest pages.
Host memory behind it holds those before them.
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import inf, log2

from msgspec import Struct

# ---- how likely an idle page is used again

BINS = 64  # thirds of an octave from SHORTEST_GAP_S on: gaps of up to six hours
SHORTEST_GAP_S = 0.01
MAX_KNOWN_PAGES = 2**18  # pages with a known last use, cached or not; 16 bytes each, allocated at once
FADES_EVERY = 50_000  # pages
KEPT = 0.7
RENEWED = 1 / 256  # more uses than at the last count of chances, before they are counted anew


class Reuse:
    """Reuse in all replicas together, as a prompt's reuse does not depend on its replica.

    Last uses are in a table of pairs. Each page belongs to one pair, and a new page replaces the older entry there:
    nearly the order of an LRU, for a sixth of its memory, which does not grow.
    """

    def __init__(self) -> None:
        self._pages = array("Q", bytes(8 * MAX_KNOWN_PAGES))
        self._last_s = array("d", [-inf]) * MAX_KNOWN_PAGES
        self._known = 0
        self._gaps = [0.0] * BINS  # uses by the time since the one before
        self._uses = 0.0
        self._until_fading = FADES_EVERY
        self._chances = [0.0] * BINS
        self._renewed_at = 0.0  # number of uses at which the chances are computed again

    def __len__(self) -> int:
        return self._known

    def used(self, pages: Iterable[int], now_s: float, *, counts: bool = True) -> int:
        """Note a use of these pages; return how many of them were used before. `counts`: towards the chances."""
        known, last_s, gaps, uses, again = self._pages, self._last_s, self._gaps, 0, 0
        for page in pages:
            place = page % MAX_KNOWN_PAGES
            if known[place] != page:
                other = place ^ 1
                if known[other] == page or last_s[other] < last_s[place]:
                    place = other
            before_s = last_s[place]
            if before_s == -inf:
                self._known += 1
            elif known[place] == page:
                gaps[_bin(now_s - before_s)] += counts
                again += 1
            known[place] = page
            last_s[place] = now_s
            uses += counts
        self._uses += uses
        self._until_fading -= uses
        if self._until_fading <= 0:
            self._until_fading = FADES_EVERY
            self._uses *= KEPT
            self._gaps = [uses * KEPT for uses in self._gaps]
            self._renewed_at = 0.0
        return again

    def chance(self, idle_s: float) -> float:
        """P(used again later, given that it was not used again within this idle time)."""
        if self._uses >= self._renewed_at:
            sooner = list(accumulate(self._gaps))
            again = sooner[-1]
            self._chances = [
                min(1.0, (again - before) / (self._uses - before)) if self._uses - before >= 1 else 0.0
                for before in sooner
            ]
            self._renewed_at = self._uses + max(1.0, RENEWED * self._uses)
        return self._chances[_bin(idle_s)]

    def check(self) -> None:
        assert self._known == sum(last_s > -inf for last_s in self._last_s)
        assert sum(self._gaps) <= self._uses + 1e-6
        assert all(0 <= chance <= 1 for chance in self._chances)


def _bin(gap_s: float) -> int:
    return 0 if gap_s < SHORTEST_GAP_S else min(BINS - 1, 1 + int(3 * log2(gap_s / SHORTEST_GAP_S)))


PAGE_TOKENS = 1024
MAX_PAGES = 2**17  # the most pages of a cache and of host memory, whatever size a replica claims; some 25 MB
MAX_GROUPS = 64  # about this many different times are distinguished
SHORTEST_S = 1.0


def pages_of(keys: Sequence[int], block_tokens: int) -> Sequence[int]:
    """The sample of a prompt's blocks that stands for all of them."""
    mask = page_tokens(block_tokens) // block_tokens - 1
    return [key for key in keys if not key & mask] if mask else keys


def page_tokens(block_tokens: int) -> int:
    """The tokens of a page: its blocks are a power of two."""
    return block_tokens << max(0, (PAGE_TOKENS // block_tokens).bit_length() - 1)


class Group(Struct, gc=False):
    """Pages that were last asked for at about the same time."""

    at_s: float
    pages: int = 0


class CacheAges:
    """Last uses of one replica's cache; empty while its `capacity_pages` are unknown."""

    def __init__(self, reuse: Reuse) -> None:
        self.page_tokens = PAGE_TOKENS
        self.capacity_pages = 0.0
        self.host_pages = 0.0
        self._reuse = reuse
        self._pages: OrderedDict[int, Group] = OrderedDict()  # the next to be evicted first
        self._groups: deque[Group] = deque()  # oldest first

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def may_evict(self) -> bool:
        """True if a long prompt may evict something: more than half of the capacity is used."""
        return 2 * len(self._pages) > self.capacity_pages

    def describe(self, block_tokens: int, capacity_tokens: float, host_tokens: float = 0.0) -> None:
        """Set the block size and the capacity, 0: not known; and that of host memory behind it."""
        if not block_tokens or not capacity_tokens:
            self.capacity_pages = self.host_pages = 0.0
            self.clear()
            return
        self.page_tokens = page_tokens(block_tokens)
        self.capacity_pages = min(MAX_PAGES, capacity_tokens / self.page_tokens)
        self.host_pages = min(MAX_PAGES, host_tokens / self.page_tokens)

    def clear(self) -> None:
        self._pages.clear()
        self._groups.clear()

    def routed(self, pages: Sequence[int], now_s: float) -> None:
        """Count a prompt's pages as used now; its end will be evicted before its beginning."""
        held = self._pages
        if len(self._groups) > 2 * MAX_GROUPS:  # some are empty by now
            self._groups = deque(group for group in self._groups if group.pages)
        groups = self._groups
        if not groups or now_s - groups[-1].at_s > max(SHORTEST_S, (now_s - groups[0].at_s) / MAX_GROUPS):
            groups.append(Group(now_s))
        newest = groups[-1]
        for page in reversed(pages):
            before = held.pop(page, None)
            if before is not None:
                before.pages -= 1
            held[page] = newest
        newest.pages += len(pages)
        while len(held) > self.capacity_pages + self.host_pages:
            held.popitem(last=False)[1].pages -= 1
        while groups and not groups[0].pages:
            groups.popleft()

    def forget(self, pages: Iterable[int]) -> None:
        """Remove pages that were routed there and have not arrived."""
        for page in pages:
            group = self._pages.pop(page, None)
            if group is not None:
                group.pages -= 1

    def lost_tokens(self, tokens: float, now_s: float, price: float = 1.0, from_host: float = 0.0) -> float:
        """Expected tokens to compute again if this many more had to be cached.

        `price`: of an evicted token, as a share of computing it: below 1 if host memory keeps it. `from_host`: so many
        of the tokens come from there, and leave room for others.
        """
        held = len(self._pages)
        in_host = max(0.0, held - self.capacity_pages)
        pages = tokens / self.page_tokens - max(0.0, self.capacity_pages - held)
        if pages <= 0 or not self.capacity_pages:
            return 0.0
        again, missing = self._used_again(in_host, pages, now_s)
        lost = price * again + missing  # there is no room for the missing ones until requests have ended
        if self.host_pages:
            gone = (tokens - from_host) / self.page_tokens - (self.capacity_pages + self.host_pages - held)
            lost += (1.0 - price) * self._used_again(0.0, gone, now_s)[0]
        return self.page_tokens * lost

    def _used_again(self, skipped: float, pages: float, now_s: float) -> tuple[float, float]:
        """Return how many of the oldest pages, after those skipped, are used again; and how many are missing."""
        again = 0.0
        for group in self._groups:
            if pages <= 0:
                return again, 0.0
            count = group.pages - skipped
            if count <= 0:
                skipped = -count
                continue
            skipped, count = 0.0, min(count, pages)
            again += self._reuse.chance(now_s - group.at_s) * count
            pages -= count
        return again, max(0.0, pages)

    def check(self) -> None:
        assert len(self._pages) <= self.capacity_pages + self.host_pages
        assert [group.at_s for group in self._groups] == sorted(group.at_s for group in self._groups)
        assert sum(group.pages for group in self._groups) == len(self._pages)
        assert all(group.pages >= 0 for group in self._groups)
