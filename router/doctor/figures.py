"""What the rules judge by: plain numbers of one look at a router and its replicas. New fields have a default.

Whatever is counted is counted over the look, unless its name says `ever`; None means that nobody says so.
"""

from msgspec import Struct


class Own(Struct, frozen=True, kw_only=True):
    """What a replica says of itself."""

    engine: str = "warmroute"
    block_tokens: int = 0  # 0: not said
    total_blocks: int = 0
    usage: float | None = None  # part of its blocks that requests hold, the least of the readings
    full: float | None = None  # part of its blocks that hold anything
    evicted_blocks: float | None = None
    query_tokens: float | None = None
    hit_tokens: float | None = None
    query_blocks: float | None = None
    prompts: float = 0
    prompt_tokens: float = 0
    preemptions: float | None = None
    refused: float = 0  # because too many wait
    caching: bool | None = None  # as it says itself
    cached_blocks: float | None = None
    prompt_tokens_ever: float = 0
    hit_tokens_ever: float | None = None
    events_ever: float | None = None
    draining: bool = False
    sends_events: bool | None = None


class Routed(Struct, frozen=True, kw_only=True):
    """What a router says of one of its replicas."""

    available: bool = True
    why: str | None = None
    breaker: str = "closed"
    state: str = "exact"
    inexact: str | None = None
    overclaim: str | None = None  # it claims more blocks than it can hold
    trust: float = 1.0  # what its claims of cached tokens count for, now
    has_events: bool = True
    lag_batches: int = 0  # the least of the readings: more than that was behind all the time
    lost_batches: float = 0
    gaps: float = 0
    repairs: float = 0
    digest_mismatches: float = 0
    restarts: float = 0
    resyncs: float = 0
    faults: float = 0
    predictions: float = 0
    wrong_predictions: float = 0
    wrong_blocks: float = 0
    requests: float = 0
    refused: float = 0  # with status 429, by the replica
    prompt_tokens: float = 0
    matched_tokens: float = 0
    resent_tokens: float = 0
    salted: float = 0
    new_salts: float = 0
    reported_blocks: float = 0
    index_blocks: float = 0
    busy: tuple[float, ...] = ()  # requests that run or wait there, reading by reading
    queued_tokens: tuple[float, ...] = ()  # prefill ahead of a new request, reading by reading


class Replica(Struct, frozen=True, kw_only=True):
    name: str
    engine: str = "warmroute"
    model: str = ""
    block_tokens: int = 0
    own: Own | None = None  # None: its /metrics cannot be had
    routed: Routed | None = None  # None: no router was asked, or it does not know this one

    @property
    def prompts(self) -> float:
        return self.own.prompts if self.own else self.routed.requests if self.routed else 0

    @property
    def prompt_tokens(self) -> float:
        return self.own.prompt_tokens if self.own else self.routed.prompt_tokens if self.routed else 0

    @property
    def hit_share(self) -> float | None:
        """Of the prompt tokens, those found in the cache; by itself, else by its answers, as the router read them."""
        if self.own is not None and self.own.query_tokens and self.own.hit_tokens is not None:
            return self.own.hit_tokens / self.own.query_tokens
        if self.routed is not None and self.routed.predictions and self.routed.prompt_tokens:
            return min(1.0, self.routed.reported_blocks * self.block_tokens / self.routed.prompt_tokens)
        return None

    @property
    def resent_share(self) -> float | None:
        """Of the prompt tokens, those with which an earlier prompt began that went there, too."""
        if self.routed is None or not self.routed.prompt_tokens:
            return None
        return self.routed.resent_tokens / self.routed.prompt_tokens

    @property
    def salted_anew_share(self) -> float:
        """Of its prompts, those with a cache salt that it had not been sent before."""
        return self.routed.new_salts / self.routed.requests if self.routed and self.routed.requests else 0.0


class Choice(Struct, frozen=True, kw_only=True):
    """One decision of the router."""

    at_s: float
    replica: str
    cached: bool = False  # the replica held more of the prompt than others: the choice explains itself


class RouterFigures(Struct, frozen=True, kw_only=True):
    policy: str = ""
    requests: float = 0
    refused: dict[str, float] = {}  # by code
    approximate: dict[str, float] = {}  # prompts by reason
    missed_tokens: float = 0  # that another replica than the chosen one held, of the choices below
    chosen_tokens: float = 0  # of the choices below
    choices: tuple[Choice, ...] | None = None  # None: they may not be read


class Figures(Struct, frozen=True, kw_only=True):
    window_s: float
    router: RouterFigures | None = None
    replicas: tuple[Replica, ...] = ()
    notes: tuple[str, ...] = ()  # what could not be asked
