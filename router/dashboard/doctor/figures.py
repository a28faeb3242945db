"""Figures of a router and its replicas over a time window, for the rules. New fields have a default.

Counters cover the window, unless their name ends with `ever`. None means unknown.
"""

from typing import NamedTuple

from msgspec import Struct, field

from router.responses import Served


class EngineFigures(Struct, frozen=True, kw_only=True):
    """Figures from a replica's own /metrics."""

    engine: str = "warmroute"
    block_tokens: int = 0  # 0: unknown
    total_blocks: int = 0
    usage: float | None = None  # share of its blocks in running requests, the lowest reading
    full: float | None = None  # share of its blocks that are not empty
    evicted_blocks: float | None = None
    query_tokens: float | None = None
    hit_tokens: float | None = None
    query_blocks: float | None = None
    prompts: float = 0
    prompt_tokens: float = 0
    preemptions: float | None = None
    refused: float = 0  # because its queue was full
    caching: bool | None = None  # its own configuration
    cached_blocks: float | None = None
    prompt_tokens_ever: float = 0
    hit_tokens_ever: float | None = None
    events_ever: float | None = None
    draining: bool = False
    sends_events: bool | None = None
    running: float | None = None  # requests, the lowest reading
    waiting: float | None = None  # requests that wait for room, the lowest reading
    cpu_wait_s: float | None = None  # could run, and had no processor


class RoutingFigures(Served, kw_only=True):
    """A router's figures of one replica, beside what it has served within the window."""

    available: bool = True
    why: str | None = None
    breaker: str = "closed"
    state: str = "exact"
    inexact: str | None = None
    overclaim: str | None = None  # why its events claim more blocks than it can hold
    unknown: dict[str, int] = field(default_factory=dict)  # parts of its events that are not read
    trust: float = 1.0  # current weight of its cached tokens
    honesty: float = 1.0  # the same, apart from what its events explain
    taken_names: dict[str, str] = field(default_factory=dict)  # names that are another base model's, and its name
    has_events: bool = True  # they are followed, and their socket was reached
    lag_batches: int = 0  # the lowest reading
    lost_batches: float = 0
    gaps: float = 0
    repairs: float = 0
    digest_mismatches: float = 0
    restarts: float = 0
    faults: float = 0
    index_blocks: float = 0
    busy: tuple[float, ...] = ()  # running and waiting requests, per reading
    queued_tokens: tuple[float, ...] = ()  # prefill ahead of a new request, per reading
    predictions_ever: float = 0
    prefill_tokens_per_s: float = 0.0  # learned; 0: unknown


class ReplicaFigures(Struct, frozen=True, kw_only=True):
    name: str
    engine: str = "warmroute"
    model: str = ""
    block_tokens: int = 0
    own: EngineFigures | None = None  # None: its /metrics cannot be read
    routed: RoutingFigures | None = None  # None: no router knows it

    @property
    def says(self) -> EngineFigures:
        """Its own figures, all of which are unknown if its /metrics cannot be read."""
        return self.own or _UNREAD

    @property
    def told(self) -> RoutingFigures:
        """The router's figures, with nothing to find in them if no router knows it."""
        return self.routed or _UNROUTED

    @property
    def is_sent_requests(self) -> bool:
        return self.routed is not None and self.routed.available

    @property
    def prompts(self) -> float:
        return self.own.prompts if self.own else self.told.requests

    @property
    def prompt_tokens(self) -> float:
        return self.own.prompt_tokens if self.own else self.told.prompt_tokens

    @property
    def hit_share(self) -> float | None:
        """The share of prompt tokens found in the cache, by the engine's metrics or else by its responses."""
        if self.says.query_tokens and self.says.hit_tokens is not None:
            return self.says.hit_tokens / self.says.query_tokens
        if self.told.predictions and self.told.prompt_tokens:
            return min(1.0, self.told.reported_blocks * self.block_tokens / self.told.prompt_tokens)
        return None

    @property
    def evicted_share(self) -> float | None:
        """The share of prompt tokens that was computed again; None while the causes of most are not known."""
        told = self.told
        known = told.elsewhere_tokens + told.evicted_tokens + told.new_tokens
        return told.evicted_tokens / told.prompt_tokens if told.prompt_tokens and known > told.unknown_tokens else None

    @property
    def salted_anew_share(self) -> float:
        """The share of prompts with a cache salt that is new there."""
        return self.told.new_salts / self.told.requests if self.told.requests else 0.0

    @property
    def billed_share(self) -> float:
        """The share of prompts that begin with a line that changes with every request."""
        return self.told.billed / self.told.requests if self.told.requests else 0.0


_UNREAD, _UNROUTED = EngineFigures(), RoutingFigures()


class DecisionSample(Struct, frozen=True):
    """The outcome of one decision of the router."""

    at_s: float
    replica: str
    cached: bool = False  # the replica held more of the prompt than others, which explains the choice


class DifferingShape(Struct, frozen=True, kw_only=True):
    """A kind of request whose prompt the router builds otherwise than a replica."""

    model: str = ""
    shape: str
    replica: str
    token: int  # the first that differs
    here: str = ""  # the text around it; empty: not to be shown
    there: str = ""


class RouterFigures(Struct, frozen=True, kw_only=True):
    policy: str = ""
    requests: float = 0
    refused: dict[str, float] = {}  # refusals by code
    approximate: dict[str, float] = {}  # prompts by reason
    choices: tuple[DecisionSample, ...] | None = None  # None: no permission to read them
    differing: tuple[DifferingShape, ...] = ()


class Diagnosis(NamedTuple):
    """A problem, its remedy, and the figures that show it."""

    rule: str
    what: str
    turn: str  # the option to change, and which way
    figures: dict[str, float | str]


class Figures(Struct, frozen=True, kw_only=True):
    window_s: float
    router: RouterFigures | None = None
    replicas: tuple[ReplicaFigures, ...] = ()
    notes: tuple[str, ...] = ()  # sources that could not be read
