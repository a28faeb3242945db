"""Times that blocks stay resident, from streams that end before most blocks do.

Blocks that are still resident say only "at least this long" (they are censored). Leaving them out would call every
cache short-lived, so quantiles are those of the Kaplan-Meier estimate, which uses both.
"""

import math
from collections import Counter
from collections.abc import Iterable

BUCKETS_PER_DECADE = 50  # ages are kept to 5 %: memory does not grow with the stream
SHORTEST_S = 1e-6
REMEMBERED_KEYS = 200_000

Place = tuple[str, int]  # medium, key


class Lifetimes:
    def __init__(self) -> None:
        self.ended = 0
        self.restored = 0  # stored again within the last REMEMBERED_KEYS removals: evicted too early
        self.without_start = 0  # ended, but in the cache before the stream was followed: not used
        self._since: dict[Place, float | None] = {}
        self._gone: dict[Place, None] = {}
        self._ended: Counter[int] = Counter()
        self._censored: Counter[int] = Counter()

    def stored(self, medium: str, keys: Iterable[int], at_s: float | None) -> None:
        """`at_s` is None for blocks that were there before (a snapshot)."""
        for key in keys:
            place = (medium, key)
            self._since.setdefault(place, at_s)
            if place in self._gone:
                del self._gone[place]
                self.restored += 1

    def removed(self, medium: str, keys: Iterable[int], at_s: float) -> None:
        for key in keys:
            place = (medium, key)
            if place not in self._since:
                continue
            since = self._since.pop(place)
            self._gone[place] = None
            if since is None:
                self.without_start += 1
            else:
                self.ended += 1
                self._ended[_bucket(at_s - since)] += 1
        while len(self._gone) > REMEMBERED_KEYS:
            del self._gone[next(iter(self._gone))]

    def cleared(self, at_s: float) -> None:
        """The cache was cleared or the replica restarted: how long these blocks would have stayed is not known."""
        self._censored += self._running(at_s)
        self._since.clear()

    def censored(self) -> int:
        """Blocks of known age that have not been evicted."""
        return self._censored.total() + sum(since is not None for since in self._since.values())

    def quantiles(self, fractions: Iterable[float], now_s: float) -> list[float | None]:
        """The age by which this fraction of blocks is gone; None if too many are still there to say."""
        censored = self._censored + self._running(now_s)
        at_risk = self._ended.total() + censored.total()
        surviving = 1.0
        steps: list[tuple[float, float]] = []  # (fraction gone, age)
        for bucket in sorted(self._ended.keys() | censored.keys()):
            if ended := self._ended[bucket]:
                surviving *= 1 - ended / at_risk
                steps.append((1 - surviving, 10 ** ((bucket + 0.5) / BUCKETS_PER_DECADE)))
            at_risk -= ended + censored[bucket]
        return [next((age for gone, age in steps if gone >= fraction - 1e-9), None) for fraction in fractions]

    def _running(self, now_s: float) -> Counter[int]:
        return Counter(_bucket(now_s - since) for since in self._since.values() if since is not None)


def _bucket(age_s: float) -> int:
    return math.floor(math.log10(max(age_s, SHORTEST_S)) * BUCKETS_PER_DECADE)
