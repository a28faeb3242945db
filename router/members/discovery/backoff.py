"""Exponential backoff with jitter."""

import random


class Backoff:
    def __init__(self, first_s: float = 0.2, most_s: float = 10.0, rng: random.Random | None = None) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._rng = rng or random.Random()
        self._attempts = 0

    @property
    def is_fresh(self) -> bool:
        """Tell whether nothing failed since the last reset."""
        return not self._attempts

    def next_s(self) -> float:
        # Doubling a float 1,100 times would overflow.
        longest_s = min(self._most_s, self._first_s * 2.0 ** min(self._attempts, 64))
        self._attempts += 1
        return longest_s * self._rng.uniform(0.5, 1.0)

    def reset(self) -> None:
        self._attempts = 0
