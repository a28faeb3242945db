"""The cost of placing a prompt on each replica, in seconds: one pass over the candidates.

    cost = slowness * (COMPUTE_WEIGHT * tokens to compute + queued prefill tokens + BUSY_TOKENS * requests) / rate

Effects on other requests are added to it (`router.placement.effects`).

`weigh` runs for every request over every replica: plain attribute reads, no object per candidate.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, TypeAlias

from msgspec import Struct, field

from router.placement.ages import CacheAges
from router.placement.queue_positions import QueuePositions
from router.placement.roles import Half, Role

COMPUTE_WEIGHT = 2.0  # a computed token delays this request, and takes room from a later one
LOWER_PRICE = 0.2  # of a token fetched from a lower medium (host memory, disk), as a share of computing it
BUSY_TOKENS = 16.0  # prefill that weighs as much as one more request being decoded
ASSUMED_TOKENS_PER_S = 8000.0  # while no replica's rate is known
ALIKE_RATES = 0.7  # rates are measured: those within this ratio count as the same
INFINITE = float("inf")
NOTHING: Mapping[int, float] = MappingProxyType({})
NONE_TRIED: frozenset[str] = frozenset()

# Why a replica cannot take a request, from the longest lasting reason to the shortest.
Obstacle: TypeAlias = Literal["role", "too_long", "unavailable", "tried", "full"]


class Candidate(Struct, eq=False):
    """A replica as the policy sees it. It lives as long as the replica; load and health keep it up to date."""

    name: str
    slot: int
    queued_tokens: float = 0.0  # prefill ahead of a new request
    running: int = 0
    waiting: int = 0
    in_flight: int = 0  # this router's own
    limit: int = 0  # most requests of ours in flight; 0: none
    prefill_tokens_per_s: float = 0.0  # learned; 0: unknown yet
    empty_tokens: float | None = None  # cache that holds nothing yet; None: unknown
    slowness: float = 1.0  # factor on its cost; > 1 while it comes back
    unavailable: str | None = None  # the reason why it takes no new request
    max_model_len: int | None = None
    assigned_tokens: float = 0.0  # all tokens that this router gave it to compute
    may_try_anyway: bool = False  # unavailable only by our own belief, not by its or an operator's word
    # Our requests that wait there, if it computes them by our rank.
    queue_positions: QueuePositions = field(default_factory=QueuePositions)
    ages: CacheAges | None = None  # None: its cache is not tracked
    is_crowded: bool = False  # our requests wait for their turn there, or its cache fills up
    role: Role | None = None


class Question(Struct, eq=False):
    """A prompt to place, and the matched tokens on each replica."""

    tokens: int
    matched: Mapping[int, float]  # slot -> tokens in GPU memory
    lower: Mapping[int, float]  # slot -> tokens in any medium (>= matched); `matched` itself while there is only one
    session: str | None = None
    tried: frozenset[str] = NONE_TRIED  # replicas that have failed this very request
    exact: bool = True  # False: `tokens` is an estimate, and no prompt is too long by an estimate
    anyway: bool = False  # also ask replicas that are only believed to be down
    turn: int = 0  # requests placed before this one, for round-robin
    now_s: float = 0.0
    came_s: float | None = None  # None: now
    awaited: Mapping[int, float] = NOTHING  # the part of `matched` that is still on its way there
    half: Half = "decode"  # of a generation, to be placed
    is_fetched: bool = False  # its KV was computed elsewhere, and is fetched from there


def weigh(
    question: Question,
    candidates: Sequence[Candidate],
    rates: list[float],
    obstacles: list[Obstacle | None],
    weight: float = COMPUTE_WEIGHT,
) -> list[float]:
    """The cost in seconds for each candidate; infinite for one that cannot take the prompt."""
    tokens = question.tokens
    on_gpu = question.matched.get
    anywhere = question.lower.get if question.lower is not question.matched else None
    costs: list[float] = []
    append = costs.append
    for candidate, rate, obstacle in zip(candidates, rates, obstacles, strict=True):
        if obstacle is not None:
            append(INFINITE)
            continue
        slot = candidate.slot
        uncached = tokens - on_gpu(slot, 0)
        if anywhere is not None:
            uncached -= (1.0 - LOWER_PRICE) * (anywhere(slot, 0) - tokens + uncached)
        if uncached < 1:
            uncached = 1  # the last token is always computed
        busy, in_flight = candidate.running, candidate.in_flight
        if busy < in_flight:
            busy = in_flight
        append(candidate.slowness * (weight * uncached + candidate.queued_tokens + BUSY_TOKENS * busy) / rate)
    return costs


def uncached_tokens(question: Question, slot: int) -> float:
    """Tokens to compute, those in lower media counted at their price."""
    matched = question.matched.get(slot, 0)
    uncached = question.tokens - matched
    if question.lower is not question.matched:
        uncached -= (1.0 - LOWER_PRICE) * (question.lower.get(slot, 0) - matched)
    return uncached if uncached > 1 else 1.0


# ---- rates


def comparable_rates(candidates: Sequence[Candidate]) -> list[float]:
    """Prefill rates to compare with; similar ones are made equal, or noise would send all cold prompts to one."""
    rates = [candidate.prefill_tokens_per_s for candidate in candidates]
    high = max(rates, default=0.0)
    if not high:
        return [ASSUMED_TOKENS_PER_S] * len(rates)
    low = min(rates)
    if low == 0:
        known = [rate for rate in rates if rate > 0]
        mean = sum(known) / len(known)
        rates = [rate or mean for rate in rates]
        low, high = min(rates), max(rates)
    if low == high:
        return rates
    if low >= ALIKE_RATES * high:
        return [(low + high) / 2] * len(rates)
    return _evened(rates)


def _evened(rates: list[float]) -> list[float]:
    """Each rate replaced by the middle of its group; a group reaches from its fastest down to ALIKE_RATES of that."""
    rest = rates
    while rest:
        high = max(rest)
        low = ALIKE_RATES * high
        middle = (high + low) / 2
        rates = [middle if low <= rate <= high else rate for rate in rates]
        rest = [rate for rate in rest if rate < low]
    return rates
