"""The limits of one key, and what it has used of them: pure, with time as an argument.

A limit is an amount per minute or per day (UTC) of a weighted sum: requests, and prompt tokens computed, prompt tokens
cached, tokens generated. Those of a minute are token buckets; those of a day count from midnight.
"""

import math
from typing import NamedTuple

from msgspec import Struct

from router.tenants.keys import Key

BURST = 1 / 6  # the share of a minute's requests that may come at once
DAY_S = 86_400
TINY = 1e-6  # sums of floats are inexact
NEVER = math.inf  # a prompt that is larger than the whole limit


class Use(NamedTuple):
    """Amounts that a key has used, or is to use."""

    requests: int = 0
    computed: int = 0  # prompt tokens
    cached: int = 0  # prompt tokens
    generated: int = 0

    def less(self, other: "Use") -> "Use":
        requests, computed, cached, generated = other
        return Use(self[0] - requests, self[1] - computed, self[2] - cached, self[3] - generated)

    def plus(self, other: "Use") -> "Use":
        requests, computed, cached, generated = other
        return Use(self[0] + requests, self[1] + computed, self[2] + cached, self[3] + generated)


NOTHING = Use()


class Limit(Struct, frozen=True):
    name: str  # the name in the file of keys
    most: float  # the amount of a minute or a day
    weights: tuple[float, float, float, float]  # the counted amounts of a Use
    bucket: int | None  # its place in a KeyState; None: it counts by day
    at_once: float
    is_of_requests: bool

    def amount(self, use: Use) -> float:
        one, two, three, four = self.weights
        return one * use[0] + two * use[1] + three * use[2] + four * use[3]


def day_number(wall_s: float) -> int:
    """The day of a time, counted from 1970."""
    return int(wall_s // DAY_S)


def limits_of(key: Key) -> tuple[Limit, ...]:
    """The limits of a key that count requests or tokens; those of a minute come first."""
    weighted = (0.0, 1.0, key.cached_token_weight, 1.0)
    by_minute = (
        ("requests_per_minute", (1.0, 0.0, 0.0, 0.0)),
        ("tokens_per_minute", weighted),
        ("computed_tokens_per_minute", (0.0, 1.0, 0.0, 0.0)),
        ("cached_tokens_per_minute", (0.0, 0.0, 1.0, 0.0)),
        ("generated_tokens_per_minute", (0.0, 0.0, 0.0, 1.0)),
    )
    found = []
    for bucket, (name, weights) in enumerate(by_minute):
        if (most := getattr(key, name)) is not None:
            at_once = max(1.0, most * BURST) if weights[0] else float(most)
            found.append(Limit(name, most, weights, bucket, at_once, weights[0] > 0))
    for name, weights in (("requests_per_day", (1.0, 0.0, 0.0, 0.0)), ("tokens_per_day", weighted)):
        if (most := getattr(key, name)) is not None:
            found.append(Limit(name, most, weights, None, most, weights[0] > 0))
    return tuple(found)


BUCKETS = 5


class Left(NamedTuple):
    """The state of one limit at a moment."""

    limit: Limit
    level: float  # may be below zero
    full_s: float  # the seconds until it is full again

    @property
    def remaining(self) -> int:
        return max(0, math.floor(self.level + TINY))

    @property
    def used(self) -> float:
        return self.limit.at_once - self.level


class KeyState(Struct):
    """The amounts that a key has used; they survive a change of the keys, and hold for all workers of a router."""

    # Token buckets: refilled evenly; steps back in time are ignored. Below zero, more was used than there was.
    levels: list[float]
    filled_s: list[float]  # the time of each one's last refill
    day: int = 0  # days since 1970
    today: Use = NOTHING
    saved: Use = NOTHING  # the part of it that is in a file, or on its way there
    in_flight: int = 0

    @classmethod
    def fresh(cls) -> "KeyState":
        return cls([math.inf] * BUCKETS, [0.0] * BUCKETS)

    def left(self, limit: Limit, now_s: float, wall_s: float) -> Left:
        if limit.bucket is None:
            self.turn(wall_s)
            return Left(limit, limit.most - limit.amount(self.today), DAY_S - wall_s % DAY_S)
        level = self._refilled(limit, limit.bucket, now_s)
        return Left(limit, level, (limit.at_once - level) * 60 / limit.most)

    def _refilled(self, limit: Limit, bucket: int, now_s: float) -> float:
        level, since_s = self.levels[bucket], self.filled_s[bucket]
        if now_s > since_s:
            level += (now_s - since_s) * limit.most / 60
            self.filled_s[bucket] = now_s
        level = self.levels[bucket] = min(limit.at_once, level)  # the limit may have changed
        return level

    def lacks(self, limits: tuple[Limit, ...], use: Use, now_s: float, wall_s: float) -> tuple[Left, float] | None:
        """The first limit that leaves no room for this, and the seconds until there is; None if all do.

        Every limit has to leave one at least, so that who has used up all sends nothing.
        """
        self.turn(wall_s)
        requests, computed, cached, generated = use
        for limit in limits:  # no calls for each: every request with a key asks several times
            one, two, three, four = limit.weights
            needed = one * requests + two * computed + three * cached + four * generated
            if limit.is_of_requests and not needed:
                continue
            if needed < 1.0:
                needed = 1.0
            if limit.bucket is None:
                level = limit.most - limit.amount(self.today)
            else:
                level = self._refilled(limit, limit.bucket, now_s)
            if level < needed - TINY:
                left = self.left(limit, now_s, wall_s)
                return left, wait_s(left, needed)
        return None

    def add(self, limits: tuple[Limit, ...], use: Use, now_s: float, wall_s: float) -> None:
        """Count what is used; negative amounts give back."""
        requests, computed, cached, generated = use
        for limit in limits:
            if (bucket := limit.bucket) is None:
                continue
            one, two, three, four = limit.weights
            if amount := one * requests + two * computed + three * cached + four * generated:
                self.levels[bucket] = min(limit.at_once, self._refilled(limit, bucket, now_s) - amount)
        self.turn(wall_s)
        self.today = self.today.plus(use)

    def turn(self, wall_s: float) -> None:
        """Be on the clock's day, which begins with nothing used."""
        if (day := int(wall_s // DAY_S)) != self.day:
            self.day, self.today, self.saved = day, NOTHING, NOTHING

    def take_unsaved(self) -> Use:
        """Take what is in no file yet; from now on it counts as saved."""
        unsaved, self.saved = self.today.less(self.saved), self.today
        return unsaved

    def read(self, day: int, in_file: Use) -> None:
        """Add the part of the sum in the file that others have used."""
        if day != self.day:
            return
        more = Use(*(max(0, count) for count in in_file.less(self.saved)))
        self.today, self.saved = self.today.plus(more), self.saved.plus(more)


def wait_s(left: Left, needed: float) -> float:
    """Seconds until this much is left; NEVER if it is more than the whole limit."""
    if needed > left.limit.at_once:
        return NEVER
    return left.full_s if left.limit.bucket is None else (needed - left.level) * 60 / left.limit.most
