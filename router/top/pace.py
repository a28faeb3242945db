"""How often a router is asked for what: so that to answer is no more than a hundredth of its work."""

from collections import deque

SHARE = 0.01
AT_FIRST = 0.1  # while it is not known whether an answer that took long was an exception
REMEMBERED = 3
LONGEST_S = 300.0
REFUSED_S = 10.0
EARLY = 0.1  # of the interval: a timer that is a little early should not cost a whole turn


class Pace:
    """Of one path. Of the last answers the quickest counts: what took longer was somebody else's doing."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._took_s: deque[float] = deque(maxlen=REMEMBERED)
        self._next_s = float("-inf")

    def is_due(self, now_s: float) -> bool:
        return now_s >= self._next_s - EARLY * self._interval_s

    def asked(self, began_s: float, took_s: float, way_s: float = 0.0) -> None:
        """`way_s`: what the way there and back takes by itself, which is no work of the router's."""
        self._took_s.append(max(0.0, took_s - way_s))
        share = SHARE if len(self._took_s) == REMEMBERED else AT_FIRST
        self._next_s = began_s + min(LONGEST_S, max(self._interval_s, min(self._took_s) / share))

    def refused(self, began_s: float) -> None:
        """It is not for us, and who asks again and again would only be counted by the router."""
        self._next_s = began_s + max(self._interval_s, REFUSED_S)

    def hurry(self) -> None:
        self._next_s = float("-inf")
