"""A budget for asking again after a refusal: a share of all requests, so that retries do not add to an overload."""

from msgspec import Struct

SHARE = 0.2  # of the requests that come
PER_S = 10.0  # and so many in any case
MOST = 100.0


class RetryBudget(Struct):
    """The budget. Time is an argument; steps back are ignored."""

    left: float = MOST
    filled_s: float = 0.0
    requests: int = 0  # that have come since; callers add to it

    def take(self, now_s: float) -> bool:
        """Take a retry; return False if none is left."""
        passed_s = max(0.0, now_s - self.filled_s)
        self.left = min(MOST, self.left + SHARE * self.requests + PER_S * passed_s)
        self.requests, self.filled_s = 0, self.filled_s + passed_s
        if self.left < 1:
            return False
        self.left -= 1
        return True
