"""Routers that get requests at the same moment take turns, so that each knows what those before it have chosen.

Facts from a peer arrive some milliseconds late. That matters only if peers get requests within that time, as in bursts
that a load balancer spreads over them: then all would choose the same idle replica. How often it happens is learned
from what they tell. Where a collision costs more than the wait, the second router waits for the first, the third for
both, and so on, in the order of their numbers.
"""

from collections import deque

from msgspec import Struct, field

from router.placement.cost import ASSUMED_TOKENS_PER_S
from router.placement.outbox import SENT_WITHIN_S

MOST_DELAY_S = 0.25  # what is measured beyond is two clocks that differ
MOST_PAUSE_S = 0.15
KEPT_S = 0.5  # until then peers may tell of a request that came at the same moment as one of ours
MOST_KEPT = 256
WEIGHT = 0.05  # of the newest observation
MARGIN_S = 0.001  # facts are read by a loop that has other work


class Came(Struct):
    """One of our requests, and the peers that got one at the same moment."""

    at_s: float
    peers: set[int] = field(default_factory=set)


class Turns:
    def __init__(self) -> None:
        self.peers = 0  # that are heard
        self.before = 0  # of these, those whose turn comes before ours
        self.share = 0.0  # of the peers that get a request at the same moment as we
        self._step_s = SENT_WITHIN_S + MARGIN_S  # until what a peer chooses is known here
        self._mean_tokens = 0.0  # to compute, of a request
        self._came: deque[Came] = deque()  # the oldest first, nearly

    def pause_s(self, replicas: int, tokens_per_s: float) -> float:
        """Return how long to wait before the choice, so that the peers before us have made theirs."""
        rate = tokens_per_s or ASSUMED_TOKENS_PER_S
        collision_s = self.share * self._mean_tokens / rate / max(1, replicas)
        if not self.before or collision_s < self._step_s:
            return 0.0
        turns = min(self.peers, int(MOST_PAUSE_S / self._step_s))  # after the first; some routers share one
        return self.before * (turns + 1) // (self.peers + 1) * self._step_s

    def sent(self, came_s: float, tokens: int, now_s: float) -> None:
        """Note one of our requests, and when it came."""
        came = self._came
        while came and (came[0].at_s < now_s - KEPT_S or len(came) >= MOST_KEPT):
            if self.peers:
                self.share += WEIGHT * (min(1.0, len(came[0].peers) / self.peers) - self.share)
            came.popleft()
        came.append(Came(came_s))
        self._mean_tokens += WEIGHT * (tokens - self._mean_tokens)

    def heard(self, peer: int, age_s: float, tokens: int, now_s: float) -> None:
        """Note a request of a peer, which has sent it so long after it came."""
        self._mean_tokens += WEIGHT * (tokens - self._mean_tokens)
        came_s = now_s - self._step_s - age_s
        for one in reversed(self._came):
            if one.at_s < came_s - self._step_s:
                break
            if one.at_s <= came_s + self._step_s:
                one.peers.add(peer)

    def delayed(self, delay_s: float) -> None:
        """Note how old the first request of a batch is when a peer hears of it."""
        self._step_s += WEIGHT * (min(MOST_DELAY_S, max(0.0, delay_s)) + MARGIN_S - self._step_s)
