"""A rate that is measured by samples, of which some mislead: an engine was cold, or was interrupted."""

from collections import deque

KEPT = 32  # samples
ENOUGH = 3  # before that nobody can tell which one is wrong
OUTLIER = 3.0  # a sample that is this many times faster or slower than usual counts as if it were just so far off


class MeasuredRate:
    """The amounts of the last samples by the seconds that they took: large ones weigh more than small ones."""

    __slots__ = ("_per_s", "_samples")

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int, float]] = deque(maxlen=KEPT)  # seconds for each one, amount, seconds
        self._per_s: float | None = 0.0  # None: to be computed

    def add(self, amount: int, seconds: float) -> None:
        self._samples.append((seconds / amount, amount, seconds))
        self._per_s = None

    @property
    def per_s(self) -> float:
        """0 while it is not known."""
        if self._per_s is None:
            self._per_s = self._measured() if len(self._samples) >= ENOUGH else 0.0
        return self._per_s

    def _measured(self) -> float:
        usual_s = self._usual_s()
        least_s, most_s = usual_s / OUTLIER, usual_s * OUTLIER
        total = took_s = 0.0
        for each_s, amount, seconds in self._samples:
            total += amount
            took_s += seconds if least_s <= each_s <= most_s else amount * (least_s if each_s < least_s else most_s)
        return total / took_s if took_s else 0.0

    def _usual_s(self) -> float:
        """Return the median of the seconds for each one, of all that the samples count together."""
        ordered = sorted(self._samples)
        left = sum(amount for _, amount, _ in ordered) / 2
        for each_s, amount, _ in ordered:
            left -= amount
            if left <= 0:
                return each_s
        return 0.0
