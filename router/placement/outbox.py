"""A router tells its peers which requests it has sent where.

Routers in front of the same replicas choose as one when each counts the others' requests like its own. Nothing is
agreed on: a fact that is lost, late or wrong spoils a guess for a while, and the list of running requests that follows
now and then puts it right. Block keys travel, prompts do not.
"""

from collections import deque
from collections.abc import Callable
from itertools import count
from math import inf
from typing import Annotated, TypeAlias

from msgspec import Meta, Struct, field

from router.placement.cost import ASSUMED_TOKENS_PER_S

# Facts are gathered for this long. What is sent matters to the next choice; what has begun or ended can wait.
SENT_WITHIN_S, OTHERS_WITHIN_S = 0.002, 0.02
BETWEEN_S = 0.007  # two batches: each costs all routers about as much as a few requests that it tells of
RUNNING_S = 0.5  # between two lists of running requests
MAX_SENT = 32  # the most requests of a batch

Number: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Numbers: TypeAlias = Annotated[list[Number], Meta(max_length=2**16)]
Tokens: TypeAlias = Annotated[int, Meta(ge=0, le=2**31)]


class PeerTurn(Struct, frozen=True, array_like=True, gc=False):
    """A turn of a session, for the working set of its model."""

    model: Annotated[str, Meta(max_length=1024)]
    party: Annotated[str, Meta(max_length=1024)]
    session: Annotated[str, Meta(max_length=2048)]  # with the party before it; empty: its pages tell which one it is
    tokens: Tokens  # of the whole prompt
    bound: Annotated[float, Meta(ge=0, le=100)]  # of the sender; 0: it holds nobody


class PeerRequest(Struct, frozen=True, array_like=True, gc=False):
    id: Number
    replica: Annotated[str, Meta(max_length=1024)]
    uncached_tokens: Tokens
    streams: bool
    priority_s: float | None
    block_size: Tokens
    keys: bytes  # the keys of its blocks, 8 bytes each, little-endian
    awaited_s: float  # how long its blocks count as stored without an event
    fetched_tokens: Tokens = 0
    age_s: float = 0.0  # time since the client sent it
    turn: PeerTurn | None = None
    is_cold: bool = False


class PeerBatch(Struct, frozen=True, array_like=True):
    """Facts in the order in which they count: sent, begun, ended, and those that still run."""

    router: Number
    number: Number  # the number of this router's last batch
    at_s: float  # the time at which the first of these requests was sent, by its clock
    sent: Annotated[list[PeerRequest], Meta(max_length=2**10)] = []
    begun: Numbers = []
    ended: Numbers = []
    running: Numbers | None = None  # None: not said this time


class Outbox:
    """Facts that the peers have not been told yet. `wake` is called with the seconds within which to `take` them."""

    def __init__(self, router: int, wake: Callable[[float], None]) -> None:
        self.router = router
        self.gathers = True  # False: what is sent is told at once, so that nobody has to take turns
        self._wake = wake
        self._wakes_s = inf  # the time that `wake` was told last
        self._taken_s = -inf
        self._sent: list[PeerRequest] = []
        self._first_s = 0.0  # the time at which the first of them was sent
        self._begun: list[int] = []
        self._ended: list[int] = []
        self._running: dict[int, None] = {}
        self._numbers = count()
        self._list_after_s = 0.0

    def sent(self, request: PeerRequest, now_s: float) -> None:
        if not self._sent:
            self._first_s = now_s
        self._sent.append(request)
        self._running[request.id] = None
        self._take_by(max(now_s + SENT_WITHIN_S, self._taken_s + BETWEEN_S) if self.gathers else now_s, now_s)

    def begun(self, request_id: int, now_s: float) -> None:
        self._begun.append(request_id)
        self._take_by(now_s + OTHERS_WITHIN_S, now_s)

    def ended(self, request_id: int, now_s: float) -> None:
        self._ended.append(request_id)
        self._running.pop(request_id, None)
        self._take_by(now_s + OTHERS_WITHIN_S, now_s)

    def _take_by(self, moment_s: float, now_s: float) -> None:
        if moment_s < self._wakes_s:
            self._wakes_s = moment_s
            self._wake(moment_s - now_s)

    def take(self, now_s: float, at_s: float) -> list[PeerBatch]:
        """Return what is to be told now; every RUNNING_S a list of running requests, even if nothing has happened.

        `at_s`: the same moment by a clock that the peers have, too.
        """
        running, self._wakes_s = None, inf
        if self._sent:
            at_s -= now_s - self._first_s
        if now_s >= self._list_after_s:
            self._list_after_s = now_s + RUNNING_S
            running = list(self._running)
        elif not (self._sent or self._begun or self._ended):
            return []
        self._taken_s = now_s
        sent, begun, ended = self._sent, self._begun, self._ended
        self._sent, self._begun, self._ended = [], [], []
        batches = []
        while len(sent) > MAX_SENT:
            batches.append(PeerBatch(self.router, next(self._numbers), at_s, sent[:MAX_SENT]))
            sent = sent[MAX_SENT:]
        batches.append(PeerBatch(self.router, next(self._numbers), at_s, sent, begun, ended, running))
        return batches


# ---- turns

MAX_DELAY_S = 0.25  # a longer time means that two clocks differ
MAX_PAUSE_S = 0.15
KEPT_S = 0.5  # peers have this long to tell of a request that came at the same moment as one of ours
MAX_KEPT = 256
WEIGHT = 0.05  # the weight of the newest observation
MARGIN_S = 0.001  # facts are read by a loop that has other work


class Came(Struct):
    """One of our requests, and the peers that got one at the same moment."""

    at_s: float
    peers: set[int] = field(default_factory=set)


class Turns:
    """Routers that get requests at the same moment take turns, so that each knows what those before it have chosen.

    Facts from a peer arrive some milliseconds late. That matters only if peers get requests within that time, as in
    bursts that a load balancer spreads over them: then all would choose the same idle replica. How often it happens
    is learned from what they tell. Where a collision costs more than the wait, the second router waits for the
    first, the third for both, and so on, in the order of their numbers.
    """

    def __init__(self) -> None:
        self.peers = 0  # the peers that are heard
        self.before = 0  # those among them whose turn comes before ours
        self.share = 0.0  # the share of peers that get a request at the same moment as we
        self._step_s = SENT_WITHIN_S + MARGIN_S  # the time until a peer's choice is known here
        self._mean_tokens = 0.0  # tokens that a request has to compute
        self._came: deque[Came] = deque()  # the oldest first, nearly

    def pause_s(self, replicas: int, tokens_per_s: float) -> float:
        """Return how long to wait before the choice, so that the peers before us have made theirs."""
        rate = tokens_per_s or ASSUMED_TOKENS_PER_S
        collision_s = self.share * self._mean_tokens / rate / max(1, replicas)
        if not self.before or collision_s < self._step_s:
            return 0.0
        turns = min(self.peers, int(MAX_PAUSE_S / self._step_s))  # after the first; some routers share one
        return self.before * (turns + 1) // (self.peers + 1) * self._step_s

    def sent(self, came_s: float, tokens: int, now_s: float) -> None:
        came = self._came
        while came and (came[0].at_s < now_s - KEPT_S or len(came) >= MAX_KEPT):
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
        self._step_s += WEIGHT * (min(MAX_DELAY_S, max(0.0, delay_s)) + MARGIN_S - self._step_s)
