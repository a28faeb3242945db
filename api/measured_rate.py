"""A rate that is measured by samples, of which some mislead: an engine was cold, or was interrupted."""

from collections import deque

KEPT = 32  # samples
ENOUGH = 3  # before that nobody can tell which one misleads
OUTLIER = 4.0  # a sample that is more times faster or slower than the usual one does not count


class MeasuredRate:
    """The amounts of the last samples by the seconds that they took: large ones weigh more than small ones.

    The usual sample is the one in the middle, however large others are.
    """

    __slots__ = ("_per_s", "_samples")

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int, float]] = deque(maxlen=KEPT)  # seconds for each one, amount, seconds
        self._per_s: float | None = 0.0  # None: to be computed

    def add(self, amount: int, seconds: float) -> None:
        """Learn from a sample; one that took no time says nothing."""
        if amount > 0 and seconds > 0:
            self._samples.append((seconds / amount, amount, seconds))
            self._per_s = None

    @property
    def per_s(self) -> float:
        """0 while it is not known."""
        if self._per_s is None:
            self._per_s = 0.0
            if len(self._samples) >= ENOUGH:
                usual_s, *_ = sorted(self._samples)[(len(self._samples) - 1) // 2]
                least_s, most_s = usual_s / OUTLIER, usual_s * OUTLIER
                total = took_s = 0.0
                for each_s, amount, seconds in self._samples:
                    if least_s <= each_s <= most_s:
                        total += amount
                        took_s += seconds
                self._per_s = total / took_s
        return self._per_s
