"""A rate that is measured by samples, of which some mislead: an engine was cold, or was interrupted."""

from bisect import bisect_left, insort
from collections import deque
from operator import itemgetter

KEPT = 32  # samples
ENOUGH = 3  # before that nobody can tell which one misleads
OUTLIER = 4.0  # a sample that is more times faster or slower than the usual one does not count


_amount, _seconds = itemgetter(1), itemgetter(2)


class MeasuredRate:
    """The amounts of the last samples by the seconds that they took: large ones weigh more than small ones.

    The usual sample is the one in the middle, however large others are.
    """

    __slots__ = ("_by_speed", "_per_s", "_samples")

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int, float]] = deque()  # seconds for each one, amount, seconds
        self._by_speed: list[tuple[float, int, float]] = []  # the same, sorted
        self._per_s: float | None = 0.0  # None: to be computed

    def add(self, amount: int, seconds: float) -> None:
        """Learn from a sample; one that took no time says nothing."""
        if amount > 0 and seconds > 0:
            sample = seconds / amount, amount, seconds
            self._samples.append(sample)
            insort(self._by_speed, sample)
            if len(self._samples) > KEPT:
                del self._by_speed[bisect_left(self._by_speed, self._samples.popleft())]
            self._per_s = None

    @property
    def per_s(self) -> float:
        """0 while it is not known."""
        if self._per_s is None:
            self._per_s = self._measured() if len(self._samples) >= ENOUGH else 0.0
        return self._per_s

    def _measured(self) -> float:
        by_speed = self._by_speed
        usual_s, *_ = by_speed[(len(by_speed) - 1) // 2]
        least_s, most_s = usual_s / OUTLIER, usual_s * OUTLIER
        if least_s <= by_speed[0][0] and by_speed[-1][0] <= most_s:  # mostly none misleads
            total, took_s = sum(map(_amount, self._samples), 0.0), sum(map(_seconds, self._samples), 0.0)
            return total / took_s
        total = took_s = 0.0
        for each_s, amount, seconds in self._samples:
            if least_s <= each_s <= most_s:
                total += amount
                took_s += seconds
        return total / took_s
