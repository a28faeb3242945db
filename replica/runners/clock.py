"""The engine's clock."""

import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float: ...

    def sleep(self, duration_s: float) -> None: ...


class WallClock:
    now_s = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)
