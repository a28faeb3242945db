"""The cost of placing a prompt on each replica, in seconds: one pass over the candidates.

    cost = slowness * (COMPUTE_WEIGHT * tokens to compute + queued prefill tokens + price * running answers) / rate

A running answer's price is the prefill that takes as long as it and the new one delay each other.
Tokens that the replica can bring from elsewhere count at their price (`router.placement.prices`).
Effects on other requests are added to it (`router.placement.effects`).

`weigh` runs for every request over every replica: plain attribute reads, no object per candidate.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, mul
from types import MappingProxyType
from typing import Literal, Protocol, TypeAlias

from msgspec import Struct

from router.placement.ages import CacheAges
from router.placement.classes import ServiceClass
from router.placement.prices import PULL, PULL_S, TOKENS_PER_S, UNKNOWN_RATES
from router.placement.queue_positions import QueuePositions


class Prompt(Protocol):
    """The properties of a prompt that placement needs."""

    @property
    def tokens(self) -> int: ...
    @property
    def exact(self) -> bool:
        """False: `tokens` is an estimate, and only approximate blocks are known."""

    @property
    def approximate_block_tokens(self) -> float: ...
    def keys(self, block_size: int, lookahead: int = 0, /) -> list[int]:
        """`lookahead`: tokens after a block that its key covers, too."""


class Unread(Struct, frozen=True):
    """The prompt of a request whose body is not understood."""

    tokens: int = 1
    exact: bool = False
    approximate_block_tokens: float = 1.0

    def keys(self, block_size: int, lookahead: int = 0, /) -> list[int]:  # noqa: ARG002
        return []


# A generation has two halves: `prefill` computes the prompt, `decode` generates the answer. One replica takes both
# unless the prompt is computed elsewhere (`router.placement.elsewhere`).
Role: TypeAlias = Literal["prefill", "decode", "both"]
Half: TypeAlias = Literal["prefill", "decode"]

# None: no role is given. Such a replica generates, and exchanges KV with nobody.
TAKES: dict[Half, frozenset[Role | None]] = {
    "prefill": frozenset({"prefill", "both"}),
    "decode": frozenset({"decode", "both", None}),
}


def can_split(roles: Iterable[Role | None]) -> bool:
    """Tell whether one of these replicas may compute a prompt, and another one generate its answer."""
    given = [role for role in roles if role is not None]
    return len(given) > 1 and any(role != "decode" for role in given) and any(role != "prefill" for role in given)


COMPUTE_WEIGHT = 2.0  # a computed token delays this request, and takes room from a later one
FLOODED_WEIGHT = 4.0  # the same beside a flood of cold prompts, when no replica is idle for what is computed twice
BUSY_TOKENS = 16.0  # prefill that weighs as much as a running answer does before it delays a step
ASSUMED_TOKENS_PER_S = 8000.0  # while no replica's rate is known
ALIKE_RATES = 0.7  # rates are measured: those within this ratio count as the same
# Before a replica was given this many, its rate is a few samples of a machine that may have been busy. A replica that
# counts as slow gets no more of them while others are idle, so this has to be sure.
PROVEN_TOKENS = 8192
INFINITE = float("inf")
NOTHING: Mapping[int, float] = MappingProxyType({})
NOTHING_BELOW: Mapping[str, Mapping[int, float]] = MappingProxyType({})
NONE_TRIED: frozenset[str] = frozenset()

# Why a replica cannot take a request, from the longest lasting reason to the shortest.
Obstacle: TypeAlias = Literal["role", "too_long", "unavailable", "tried", "full"]


@dataclass(slots=True, eq=False)
class Candidate:
    """A replica as the policy sees it. It lives as long as the replica; load and health keep it up to date."""

    name: str
    slot: int
    queued_tokens: float = 0.0  # prefill ahead of a new request
    running: int = 0
    waiting: int = 0
    answer_delay_s: float = 0.0  # by which two answers that run there delay each other; 0: unknown
    in_flight: int = 0  # this router's own
    limit: int = 0  # most requests in flight, its peers' included; 0: none
    prefill_tokens_per_s: float = 0.0  # learned; 0: unknown yet
    empty_tokens: float | None = None  # cache that holds nothing yet; None: unknown
    slowness: float = 1.0  # factor on its cost; > 1 while it comes back
    unavailable: str | None = None  # the reason why it takes no new request
    max_model_len: int | None = None
    assigned_tokens: float = 0.0  # all tokens that this router and its peers gave it to compute
    may_try_anyway: bool = False  # unavailable only by our own belief, not by its or an operator's word
    # Requests that wait there, if it computes them by our rank.
    queue_positions: QueuePositions = field(default_factory=QueuePositions)
    ages: CacheAges | None = None  # None: its cache is not tracked
    is_crowded: bool = False  # our requests wait for their turn there, or its cache fills up
    load_tokens_per_s: Mapping[str, float] = field(default_factory=lambda: UNKNOWN_RATES)  # reported rates by source
    kv_read: str = ""  # the endpoint at which neighbours may read its blocks; empty: none
    kv_layout: str = ""  # only replicas of one layout can use each other's blocks
    role: Role | None = None
    all_in_flight: int = 0  # this router's, and those that its peers tell of


class Neighbour(Struct, frozen=True, gc=False):
    """A replica that should hold the first tokens of a prompt."""

    slot: int
    name: str
    endpoint: str
    tokens: int


class Pull(Struct, frozen=True):
    """A prompt's beginning that a replica may read from its neighbours."""

    tokens: float
    neighbours: tuple[Neighbour, ...]  # the best is first


NO_PULLS: Mapping[int, Pull] = MappingProxyType({})


class Tenant(Struct, frozen=True, gc=False):
    """A party with a share of the replicas of a model: a key, or a client that a gateway names."""

    name: str
    model: str = ""
    weight: float = 1.0
    service: ServiceClass | None = None  # None: there are no classes


class Question(Struct, eq=False, gc=False):
    """A prompt to place, and the matched tokens on each replica."""

    tokens: int
    matched: Mapping[int, float]  # slot -> tokens in GPU memory
    below: Mapping[str, Mapping[int, float]] = NOTHING_BELOW  # source -> slot -> tokens, with those of cheaper sources
    session: str | None = None
    tried: frozenset[str] = NONE_TRIED  # replicas that have failed this very request
    exact: bool = True  # False: `tokens` is an estimate, and no prompt is too long by an estimate
    anyway: bool = False  # also ask replicas that are only believed to be down
    turn: int = 0  # requests placed before this one, for round-robin
    now_s: float = 0.0
    came_s: float | None = None  # None: now
    awaited: Mapping[int, float] = NOTHING  # the part of `matched` that is still on its way there
    readable: Mapping[int, float] = NOTHING  # slot -> tokens that neighbours may read there, by events alone
    pulls: Mapping[int, Pull] = NO_PULLS  # slot -> its reads from neighbours; `choose` sets them
    half: Half = "decode"  # the half of a generation that is to be placed
    busy_tokens: float = BUSY_TOKENS  # the price of a running answer; `weigh` sets it
    is_fetched: bool = False  # its KV was computed elsewhere, and is handed over from there
    source: Candidate | None = None  # a replica of ours that has computed it for whoever generates, to read it there
    tenant: Tenant | None = None
    behind_s: float = 0.0  # it counts as come this much later, by its class, or as its tenant had more than its share
    lead_s: float = 0.0  # the part of it by which its tenant had more than its share
    stands_back: bool = False  # it leaves room for higher classes, or for tenants that had less
    weight: float = COMPUTE_WEIGHT
    is_cold: bool = False  # its tenant had more than its share, of prompts that hardly ever come again
    further_tokens: int = 0  # tokens of the request's other prompts, to compute wherever it goes
    within: str | None = None  # the session that has begun this one
    model: str = ""  # whose working set it is of; empty: of none

    @property
    def counts_from_s(self) -> float:
        """Its arrival, in the order in which prompts are computed."""
        return (self.now_s if self.came_s is None else self.came_s) + self.behind_s

    def reached(self, slot: int) -> float:
        """The tokens that a replica holds in any medium."""
        return max([self.matched.get(slot, 0), *(level.get(slot, 0) for level in self.below.values())])


def weigh(
    question: Question,
    candidates: Sequence[Candidate],
    rates: list[float],
    obstacles: list[Obstacle | None],
    weight: float = COMPUTE_WEIGHT,
) -> list[float]:
    """The cost in seconds for each candidate; infinite for one that cannot take the prompt."""
    tokens = question.tokens + question.further_tokens
    on_gpu, saved = question.matched.get, saved_by(question) if question.below or question.pulls else None
    delays_s = list(map(_answer_delay_s, candidates))
    known = len(delays_s) - delays_s.count(0.0) if question.half == "decode" else 0
    # One price for all, at the mean: what each one measures is noisy.
    question.busy_tokens = busy_tokens = BUSY_TOKENS + (sum(map(mul, delays_s, rates)) / known if known else 0.0)
    costs: list[float] = []
    append = costs.append
    for candidate, rate, obstacle in zip(candidates, rates, obstacles, strict=True):
        if obstacle is not None:
            append(INFINITE)
            continue
        uncached = tokens - on_gpu(candidate.slot, 0)
        if saved is not None:
            uncached -= saved(candidate, rate)
        if uncached < 1:
            uncached = 1  # the last token is always computed
        busy = running if (running := candidate.running) > (in_flight := candidate.all_in_flight) else in_flight
        append(candidate.slowness * (weight * uncached + candidate.queued_tokens + busy_tokens * busy) / rate)
    return costs


# ---- the tokens of one prompt at one replica


def uncached_tokens(question: Question, candidate: Candidate, rate: float) -> float:
    """Tokens to compute, those that the replica brings counted at their price."""
    uncached = question.tokens - question.matched.get(candidate.slot, 0)
    if question.below or question.pulls:
        uncached -= saved_tokens(question, candidate, rate, question.pulls.get(candidate.slot))
    return (uncached if uncached > 1 else 1.0) + question.further_tokens


def saved_by(question: Question) -> Callable[[Candidate, float], float] | None:
    """Return a function for the tokens that a candidate saves by bringing them; None: no replica can bring any."""
    pulls = question.pulls
    if not question.below and not pulls:
        return None
    if pulls or len(question.below) > 1:
        return lambda candidate, rate: saved_tokens(question, candidate, rate, pulls.get(candidate.slot))
    on_gpu = question.matched.get
    [(source, level)] = question.below.items()
    held, usual = level.get, TOKENS_PER_S[source]

    def saved(candidate: Candidate, rate: float) -> float:
        """Do as `saved_tokens` does with one source: mostly this is host memory."""
        slot = candidate.slot
        tokens: float = held(slot, 0) - on_gpu(slot, 0)
        share = rate / (candidate.load_tokens_per_s.get(source) or usual)
        return (1.0 - share) * tokens if tokens > 0 and share < 1.0 else 0.0

    return saved


def saved_tokens(question: Question, candidate: Candidate, rate: float, pull: Pull | None) -> float:
    """Tokens that need not be computed, less their prices and the fixed cost of a pull."""
    saved = 0.0
    for share, source, tokens in brought(question, candidate, rate, pull):
        saved += (1.0 - share) * tokens
        if source == PULL:
            saved -= PULL_S * rate
    return saved


def brought(question: Question, candidate: Candidate, rate: float, pull: Pull | None) -> list[tuple[float, str, float]]:
    """Price, source and number of the tokens after those in GPU memory, each from the cheapest source that has it."""
    slot, rates = candidate.slot, candidate.load_tokens_per_s
    reached = question.matched.get(slot, 0)
    offers = []
    for source, level in question.below.items():
        tokens = level.get(slot, 0)
        if tokens > reached:
            offers.append((rate / (rates.get(source) or TOKENS_PER_S[source]), source, tokens))
    if pull is not None:
        offers.append((rate / (rates.get(PULL) or TOKENS_PER_S[PULL]), PULL, pull.tokens))
    if len(offers) > 1:
        offers.sort()
    parts = []
    for share, source, tokens in offers:
        if tokens > reached and share < 1.0:  # else computing is cheaper
            parts.append((share, source, tokens - reached))
            reached = tokens
    return parts


# ---- rates


_measured_rate, _answer_delay_s = attrgetter("prefill_tokens_per_s"), attrgetter("answer_delay_s")


def comparable_rates(candidates: Sequence[Candidate]) -> list[float]:
    """Prefill rates to compare with; similar ones are made equal, or noise would send all cold prompts to one."""
    rates = list(map(_measured_rate, candidates))
    low, high = min(rates, default=0.0), max(rates, default=0.0)
    if not high:
        return [ASSUMED_TOKENS_PER_S] * len(rates)
    if low == high:
        return rates
    if not all(candidate.assigned_tokens >= PROVEN_TOKENS for candidate in candidates) or not low:
        known = [rate for rate in rates if rate > 0]
        mean = sum(known) / len(known)
        rates = [
            rate if rate and candidate.assigned_tokens >= PROVEN_TOKENS else mean
            for rate, candidate in zip(rates, candidates, strict=True)
        ]
        low, high = min(rates), max(rates)
    if low >= ALIKE_RATES * high:
        return [(low + high) / 2] * len(rates)
    rest = rates
    while rest:  # each is replaced by the middle of its group, from its fastest down to ALIKE_RATES of that
        high = max(rest)
        low = ALIKE_RATES * high
        middle = (high + low) / 2
        rates = [middle if low <= rate <= high else rate for rate in rates]
        rest = [rate for rate in rest if rate < low]
    return rates


# ---- eligibility: only here it is decided which replicas can take a request now, and why others cannot


def obstacles(
    candidates: Sequence[Candidate],
    tokens: int = 0,
    tried: frozenset[str] = NONE_TRIED,
    anyway: bool = False,
    half: Half = "decode",
    stands_back: bool = False,
) -> list[Obstacle | None]:
    """The obstacle at each candidate; None: it is eligible.

    `tokens`: 0 where the length is an estimate, as no prompt is too long by an estimate. `anyway`: replicas that are
    only believed to be down are eligible, too. `stands_back`: its tenant was given more than its share, and leaves half
    of the room to the others. It runs for every request: one pass, no call per candidate.
    """
    roles, part = TAKES[half], 2 if stands_back else 1
    return [
        "role"
        if one.role not in roles
        else "too_long"
        if (longest := one.max_model_len) is not None and tokens > longest
        else "unavailable"
        if one.unavailable is not None and not (anyway and one.may_try_anyway)
        else "tried"
        if tried and one.name in tried
        else "full"
        if 0 < one.limit <= one.all_in_flight * part
        else None
        for one in candidates
    ]


def can_take(candidate: Candidate, tokens: int = 0, tried: frozenset[str] = NONE_TRIED) -> bool:
    return obstacles((candidate,), tokens, tried) == [None]


def in_words(obstacle: Obstacle | None, candidate: Candidate, tokens: int) -> str | None:
    match obstacle:
        case "role":
            return f"its role is {candidate.role or 'not given'}"
        case "too_long":
            return f"too long: {tokens:,} tokens, its max_model_len is {candidate.max_model_len:,}"
        case "unavailable":
            return candidate.unavailable
        case "tried":
            return "has failed this request before"
        case "full":
            return f"full: {candidate.all_in_flight:,} requests in flight, its limit is {candidate.limit:,}"
    return None
