"""The speed at which blocks come back from each medium, learned from what loads took."""

from collections.abc import Callable, Iterable
from time import monotonic
from typing import NamedTuple

HALF_LIFE_BLOCKS = 500.0
FORGET_S = 60.0  # a medium that seemed too slow is tried again


class Measured(NamedTuple):
    blocks: float
    seconds: float
    at_s: float


class LoadSpeeds:
    """Blocks per second by medium; the past fades, and is forgotten when nothing new comes."""

    def __init__(self, now_s: Callable[[], float] = monotonic) -> None:
        self._now_s = now_s
        self._measured: dict[str, Measured] = {}

    def add(self, medium: str, blocks: int, duration_s: float) -> None:
        before = self._measured.get(medium, Measured(0.0, 0.0, 0.0))
        fading = 0.5 ** (blocks / HALF_LIFE_BLOCKS)
        self._measured[medium] = Measured(
            before.blocks * fading + blocks, before.seconds * fading + duration_s, self._now_s()
        )

    def blocks_per_s(self, medium: str) -> float:
        """0 while it is not known."""
        known = self._measured.get(medium)
        if known is None or known.seconds <= 0 or self._now_s() - known.at_s > FORGET_S:
            return 0.0
        return known.blocks / known.seconds

    def media(self) -> Iterable[str]:
        return tuple(self._measured)  # others add to them meanwhile
