"""When to connect again: at once after a cut, less and less often where connections never last."""

import random
from collections.abc import Callable

RECONNECT_S = 2.0  # after a connection that was ended because its peer broke the rules
LET_IN_S = 1.0  # a publisher that is full ends a connection sooner
RETRY_S = 0.05  # doubled with each try that finds nobody
RETRY_AT_MOST_S = 0.5
FIRST_PAUSE_S = 0.1  # doubled with each short connection
LONGEST_PAUSE_S = 10.0


class Reconnects:
    """Schedules reconnects; the caller does them."""

    def __init__(self, jitter: Callable[[], float] = lambda: random.uniform(0.5, 1.0)) -> None:
        self._jitter = jitter  # subscribers that were shut out together should not all return together
        self._connected_s: float | None = None
        self._short = 0  # connections in a row that ended at once
        self._failed = 0  # tries in a row that found nobody

    def connected(self, now_s: float) -> None:
        self._connected_s = now_s
        self._failed = 0

    def lost(self, now_s: float) -> float | None:
        """Return for how long not to connect; None: connections do not end at once, so a retry is enough."""
        lasted = self._connected_s is not None and now_s - self._connected_s >= LET_IN_S
        self._connected_s = None
        self._short = 0 if lasted else self._short + 1
        if self._short < 2:
            return None
        return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self._short - 1, 10)) * self._jitter()

    def retry(self) -> float:
        """Return in how many seconds to connect when there was nobody, or after a connection that had lasted."""
        self._failed += 1
        return min(RETRY_AT_MOST_S, RETRY_S * 2.0 ** min(self._failed - 1, 10)) * self._jitter()
