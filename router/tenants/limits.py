"""The use of an API key, and its limits."""

import math

from msgspec import Struct

from api.errors import ApiError
from router.tenants.keys import Key

BURST = 1 / 6  # the share of a minute's requests that may come at once


class Bucket(Struct):
    """A token bucket, refilled evenly; steps back in time are ignored."""

    tokens: float
    filled_s: float

    def take(self, per_minute: float, now_s: float) -> float:
        """Take a token and return 0, or return the seconds until there is one."""
        most = max(1.0, per_minute * BURST)
        if now_s > self.filled_s:
            self.tokens = min(most, self.tokens + (now_s - self.filled_s) * per_minute / 60)
            self.filled_s = now_s
        self.tokens = min(most, self.tokens)  # the limit may have changed
        if self.tokens >= 1.0 - 1e-9:  # sums of floats are inexact
            self.tokens = max(0.0, self.tokens - 1.0)
            return 0.0
        return (1.0 - self.tokens) * 60 / per_minute


class Usage(Struct):
    """The usage of one key; it survives a change of the keys."""

    bucket: Bucket | None = None
    in_flight: int = 0

    def take(self, key: Key, now_s: float) -> None:
        """Raise ApiError 429 if the key may not send one more request now."""
        if key.max_in_flight is not None and self.in_flight >= key.max_in_flight:
            raise _limited(f"this API key has {self.in_flight} requests running, which is its limit; wait for one", 1)
        if key.requests_per_minute is not None:
            if self.bucket is None:
                self.bucket = Bucket(math.inf, now_s)
            wait_s = self.bucket.take(key.requests_per_minute, now_s)
            if wait_s > 0:
                rate = f"{key.requests_per_minute:g} requests a minute"
                raise _limited(f"this API key may send {rate}; try again in {wait_s:.1f} s", wait_s)


def _limited(message: str, wait_s: float) -> ApiError:
    # The header counts whole seconds (RFC 9110, 10.2.3).
    headers = {"Retry-After": str(max(1, math.ceil(wait_s)))}
    return ApiError(429, message, "rate_limit_error", code="rate_limit_exceeded", headers=headers)
