"""Counters of the keys with most tokens, for metrics: so many have their own, the others have one together.

A key that comes among the first gets counters that begin at 0, and the others' keep what they have: so none ever falls.
"""

from collections.abc import Iterator
from heapq import nlargest

from router.tenants.usage import NO_KEY, Counts

OTHER = "other"
MOST_KEYS = 2**14  # those that come later are only counted among the others


class KeyTotals:
    def __init__(self, most: int) -> None:
        self._most = most
        self._tokens: dict[str, int] = {}  # of all keys since the start
        self._own: dict[str, Counts] = {}
        self._others = Counts()

    def add(self, key: str, counts: Counts) -> None:
        if key in self._tokens or len(self._tokens) < MOST_KEYS:
            self._tokens[key] = self._tokens.get(key, 0) + counts.tokens
            if len(self._own) < self._most:
                self._own.setdefault(key, Counts())
        self._own.get(key, self._others).add(counts)

    def shown(self) -> Iterator[tuple[str, Counts]]:
        """The counters by key, those of the others last."""
        first = nlargest(self._most, self._tokens, key=lambda key: (self._tokens[key], key in self._own))
        self._own = {key: self._own.get(key) or Counts() for key in first}
        for key, counts in self._own.items():
            yield key or NO_KEY, counts
        yield OTHER, self._others
