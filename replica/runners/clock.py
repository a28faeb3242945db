"""The engine's clock: wall time, or virtual time that passes only during sleeps."""

import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float: ...

    def sleep(self, duration_s: float) -> None: ...


class WallClock:
    now_s = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)


class VirtualClock:
    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        return self._now_s

    def sleep(self, duration_s: float) -> None:
        self._now_s += duration_s
