"""One request's charge on the limits of its key: from its admission, over its prompt, to the end of its answer."""

import math
from collections.abc import Callable
from time import time

from msgspec import Struct

from api.errors import ApiError
from router.tenants.keys import Key
from router.tenants.limits import DAY_S, NEVER, NOTHING, KeyState, Left, Limit, Use, limits_of
from router.tenants.shared_limits import SharedLimits

LONG_WAIT_S = 60.0  # clients that wait less before they try again would do so in vain
REQUEST = Use(requests=1)
KINDS = ((True, "requests"), (False, "tokens"))  # the kinds of limits


class Account(Struct, frozen=True, eq=False):
    """A key with limits, and where what it has used is kept."""

    key: Key
    limits: tuple[Limit, ...]
    shared: SharedLimits
    wall: Callable[[], float] = time  # days are those of the calendar

    @property
    def has_days(self) -> bool:
        return any(limit.bucket is None for limit in self.limits)

    def admit(self, now_s: float) -> "Charge":
        """Charge one request; raise ApiError 429 if the key may not send one more now."""
        key, wall_s = self.key, self.wall()
        with self.shared.opened(key.name) as state:
            if key.max_in_flight is not None and state.in_flight >= key.max_in_flight:
                running = f"this API key has {state.in_flight} requests running, which is its limit (max_in_flight)"
                raise _limited(f"{running}; wait for one", "max_in_flight", {"Retry-After": "1"})
            if (lack := state.lacks(self.limits, REQUEST, now_s, wall_s)) is not None:
                lefts = [state.left(limit, now_s, wall_s) for limit in self.limits]
                raise self.refusal(lack, rate_headers(lefts))
            state.add(self.limits, REQUEST, now_s, wall_s)
            state.in_flight += 1
            return Charge(self, REQUEST, state.day)

    def refusal(self, lack: tuple[Left, float], more: list[tuple[str, str]], needs: float = 0) -> ApiError:
        """The error for a limit that leaves no room; `more`: further headers."""
        left, wait_s = lack
        headers = dict(more)
        if wait_s != NEVER:
            headers["Retry-After"] = str(max(1, math.ceil(wait_s)))  # whole seconds (RFC 9110, 10.2.3)
        if wait_s > LONG_WAIT_S:
            headers["x-should-retry"] = "false"  # OpenAI's clients obey it
        return _limited(explained(left, wait_s, needs), left.limit.name, headers)


class Charge(Struct, eq=False):
    """The amounts that one request has been charged so far; `close` it once."""

    account: Account
    charged: Use
    day: int
    is_open: bool = True
    is_prompted: bool = False

    def take_prompt(self, use: Use, now_s: float) -> None:
        """Charge its prompt, once; raise ApiError 429 if that is more than is left: then it costs nothing."""
        if self.is_prompted or not self.is_open:
            return
        self.is_prompted = True
        account, wall_s = self.account, self.account.wall()
        with account.shared.opened(account.key.name) as state:
            lack = state.lacks(account.limits, use, now_s, wall_s)
            if lack is not None:
                self._add(state, NOTHING.less(self.charged), now_s, wall_s)
                amount = lack[0].limit.amount(use)
                raise account.refusal(lack, [], amount)  # its answer has these headers already
            self._add(state, use, now_s, wall_s)

    def close(self, tokens: Use | None = None, now_s: float = 0.0) -> None:
        """End the charge, corrected to what was used in the end."""
        if not self.is_open:
            return
        self.is_open = False
        account = self.account
        if tokens is None or tokens[1:] == self.charged[1:]:
            account.shared.ended_one(account.key.name)
            return
        with account.shared.opened(account.key.name) as state:
            state.in_flight -= 1
            self._settle(state, tokens, now_s, account.wall())

    def headers(self, now_s: float, tokens: Use | None = None) -> list[tuple[str, str]]:
        """OpenAI's headers about limits, as they are now that the charge is corrected to these tokens."""
        account, wall_s = self.account, self.account.wall()
        with account.shared.opened(account.key.name) as state:
            if tokens is not None and self.is_open:
                self._settle(state, tokens, now_s, wall_s)
            left = [state.left(limit, now_s, wall_s) for limit in account.limits]
        return rate_headers(left)

    def lines(self, now_s: float, tokens: Use | None = None) -> bytes:
        return "".join([f"{name}: {value}\r\n" for name, value in self.headers(now_s, tokens)]).encode()

    def _settle(self, state: KeyState, tokens: Use, now_s: float, wall_s: float) -> None:
        charged = self.charged
        more = Use(0, tokens[1] - charged[1], tokens[2] - charged[2], tokens[3] - charged[3])
        if more != NOTHING:
            self._add(state, more, now_s, wall_s)

    def _add(self, state: KeyState, use: Use, now_s: float, wall_s: float) -> None:
        self.charged = self.charged.plus(use)
        state.add(self.account.limits, use, now_s, wall_s)
        if state.day != self.day:  # yesterday's charges are not given back today
            state.today = state.today.less(Use(*(min(0, count) for count in use)))


def account_of(key: Key, shared: SharedLimits, wall: Callable[[], float] = time) -> Account | None:
    """The account of a key; None if it has no limits."""
    limits = limits_of(key)
    return Account(key, limits, shared, wall) if limits or key.max_in_flight is not None else None


# ---- words


def rate_headers(lefts: list[Left]) -> list[tuple[str, str]]:
    """The headers for requests and for tokens: of several limits, about the one of which least is left."""
    first: dict[bool, Left] = {}
    for left in lefts:
        kind = left.limit.is_of_requests
        if kind not in first or left.level < first[kind].level:
            first[kind] = left
    headers = []
    for kind, name in KINDS:
        if kind in first:
            left = first[kind]
            headers.append((f"x-ratelimit-limit-{name}", f"{left.limit.most:.0f}"))
            headers.append((f"x-ratelimit-remaining-{name}", str(left.remaining)))
            headers.append((f"x-ratelimit-reset-{name}", duration(left.full_s)))
    return headers


def duration(seconds: float) -> str:
    """A time as OpenAI writes it: 20ms, 1s, 1.5s, 6m0s, 1h2m3s. From a minute on it is rounded up to a second."""
    ms = math.ceil(seconds * 1000 - 1e-6)
    if ms < 1000:
        return f"{max(0, ms)}ms"
    if ms < 60_000:
        return f"{ms / 1000:g}s"
    minutes, rest = divmod(math.ceil(ms / 1000), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s"


def explained(left: Left, wait_s: float, needs: float) -> str:
    """The reason of a refusal: which limit, what is used of it, and when it is free again."""
    limit = left.limit
    per = "minute" if limit.bucket is not None else "day (UTC)"
    what = "requests" if limit.is_of_requests else limit.name.rpartition("_per_")[0].replace("_", " ")
    text = f"this API key may use {limit.most:,.0f} {what} a {per} ({limit.name}); "
    if wait_s == NEVER:
        return text + f"this prompt alone counts as {needs:,.0f}; shorten it"
    text += f"{max(0.0, left.used):,.0f} of {limit.at_once:,.0f} are used"
    if needs > 1:
        text += f", and this prompt counts as {needs:,.0f}"
    return f"{text}; try again in {duration(wait_s) if wait_s < DAY_S else '1 day'}"


def _limited(message: str, limit: str, headers: dict[str, str]) -> ApiError:
    return ApiError(429, message, "rate_limit_error", param=limit, code="rate_limit_exceeded", headers=headers)
