"""Responses of GET /replicas and /decisions, and POST /explain, as the router writes and its clients read them.

Fields of newer routers are ignored, and most have a default, for the sake of older ones. docs/router-api.md describes
those of /explain. Fields are written in this order.
"""

from collections.abc import Sequence

from msgspec import Struct, field

from router.placement.decision import CostParts, Portion, Verdict

# ---- GET /replicas


class Load(Struct, frozen=True):
    queued_tokens: float = 0
    running: int = 0
    waiting: int = 0
    in_flight: int = 0
    prefill_tokens_per_s: float = 0.0
    empty_tokens: float | None = None
    total_blocks: int | None = None  # None: unknown


class Index(Struct, frozen=True):
    blocks: dict[str, int] = {}  # all KV-cache groups, by medium
    accuracy: float = 1.0
    prompt_blocks: dict[str, int] | None = None  # those that prompts can use, whichever groups hold them


class FeedState(Struct, frozen=True):
    """The state of one replica's event stream, and whether the index is exact for it."""

    exact: bool = True
    reason: str | None = None  # why not exact
    partial: bool = False  # inexact, and no repair is under way: it is used as it is
    connected: bool = True
    block_sizes: tuple[int, ...] = ()  # sorted
    last_event_age_s: float | None = None
    lag_batches: int = 0
    seq: int = -1  # the last batch applied, or -1
    incarnation: int | None = None
    gaps: int = 0
    lost_batches: int = 0
    replays: int = 0
    snapshots: int = 0
    reconnects: int = 0
    restarts: int = 0
    digest_mismatches: int = 0
    overclaim: str | None = None  # it has claimed more blocks than it can hold
    repairs: int = 0  # requests for missing or doubted state
    unknown: dict[str, int] = {}  # event types and fields that are not read, as often as they came
    unreached: bool = False  # its event socket has never been connected, though there was time


class PromptCounts(Struct, kw_only=True):
    """Counts of the prompts that one replica was sent."""

    prompt_tokens: int = 0
    matched_tokens: int = 0  # predicted to be cached
    cached_tokens: int = 0  # as reported, else as predicted
    reported_blocks: int = 0  # cached ones, of requests whose report is known
    salted: int = 0  # prompts with a cache salt
    new_salts: int = 0  # those among them with one that was not seen before
    billed: int = 0  # prompts that begin with Claude Code's billing line
    kept_tokens: int = 0  # those of the evicted ones that one more replica's memory would have kept
    # Computed tokens by cause, in the order of their parts in a prompt:
    unknown_tokens: int = 0  # it was said to have them, or nothing is known of them
    elsewhere_tokens: int = 0  # another replica had them, and could have taken the request
    evicted_tokens: int = 0  # they had been held, and no replica that could take the request held them any more
    new_tokens: int = 0  # no replica had held them


CAUSES = PromptCounts.__struct_fields__[-4:]


class Served(PromptCounts):
    """Totals over all models since the router added the replica: two readings give rates."""

    requests: int = 0
    generated_tokens: int = 0  # those of answers that still run included
    streamed_tokens: int = 0  # those among them that came after the first of a streamed answer
    streaming_s: float = 0.0  # the time that those have taken
    refused: int = 0  # those that it refused with status 429
    predictions: int = 0  # answers whose cached blocks were compared with the prediction
    wrong_predictions: int = 0
    wrong_blocks: int = 0
    resyncs: int = 0


class Rates(Struct, frozen=True):
    """Work of the last 5 to 10 seconds, by all workers; None: there was nothing to divide."""

    requests_per_s: float = 0.0
    errors_per_s: float = 0.0
    prompt_tokens_per_s: float = 0.0
    generated_tokens_per_s: float = 0.0
    token_s: float | None = None  # the mean time of a token after the first one of a streamed answer
    hit_predicted: float | None = None
    hit_reported: float | None = None
    ttft_p50_s: float | None = None


class Recent(Rates, frozen=True):
    batches_per_s: float = 0.0  # of the replica's event stream


STANDINGS = ("down", "draining", "syncing", "lagging", "partial", "approximate", "exact")  # the worst first


class ReplicaStatus(Struct, frozen=True):
    name: str
    url: str = ""
    engine: str = "auto"
    models: list[str] = []
    available: bool = True
    why: str | None = None
    state: str = "approximate"
    inexact: str | None = None
    trust: float = 1.0
    tokenizer: str | None = None
    isolation: str | None = None
    block_size: int | None = None
    max_model_len: int | None = None
    incarnation: int | str | None = None
    breaker: str = "closed"
    slowness: float = 1.0
    load: Load = Load()
    index: Index = Index()
    events: FeedState | None = None
    heard_age_s: float | None = None
    served: Served = field(default_factory=Served)
    rank: int | None = None  # its number, if several are behind its URL
    role: str | None = None
    idle: str | None = None  # why it has nothing to do; None: it has, or that is not known
    honesty: float = 1.0  # its trust, for people: tokens that its events explain count as true
    taken_names: dict[str, str] = {}  # names that it may not serve, each with the base model that has it
    standing: str = ""  # one of STANDINGS: that it gets no requests counts for more than the state of its index
    severity: int = 0  # 2: it serves no requests; 1: it needs a look
    faults: int = 0
    cache_used: float | None = None  # a share
    recent: Recent | None = None  # None: an older router


class ReplicaList(Struct, frozen=True):
    replicas: list[ReplicaStatus]


# ---- GET /decisions


class Considered(Struct, frozen=True):
    name: str
    matched_tokens: int = 0
    cost_s: float | None = None  # None: it could not take the request
    parts: CostParts | None = None  # the cost in parts


class PrefillRecord(Struct, frozen=True, gc=False):
    """The place where the prompt was computed: the chosen replica, or another one that handed its KV over."""

    elsewhere: bool = False
    why: str = ""
    replica: str | None = None  # the one that was to compute it; None: no other was looked for
    outcome: str | None = None  # see `router.proxy.request_summary`
    here_s: float = 0.0
    here_harm_s: float = 0.0
    there_s: float = 0.0
    there_harm_s: float = 0.0
    transfer_s: float = 0.0
    duration_s: float = 0.0
    predicted_cached_tokens: int | None = None
    reported_cached_tokens: int | None = None


class DecisionRecord(Struct, frozen=True, gc=False):
    """A decision and the outcome of its request, without a word of the prompt."""

    ts: float
    request_id: str
    model: str = ""
    policy: str = ""
    chosen: str | None = None
    prompt_tokens: int = 0
    exact: bool = True
    predicted_cached_tokens: int | None = None
    reported_cached_tokens: int | None = None
    estimated_ttft_s: float | None = None
    ttft_s: float | None = None
    duration_s: float = 0.0
    waited_s: float = 0.0
    retries: int = 0
    resumes: int = 0
    status: int = 0
    why: str | None = None  # the reason if it was not answered
    candidates: Sequence[Considered] = ()
    tokens_exact: bool | None = None  # the same as `exact`; None, as in the next two: an older router
    index_exact: bool | None = None
    prediction_exact: bool | None = None
    why_inexact: str | None = None
    session: str | None = None
    portions: tuple[Portion, ...] = ()  # the sources from which the chosen replica was to take the prompt's tokens
    prefill: PrefillRecord | None = None  # None: nothing was weighed, as no two replicas have roles
    service_class: str | None = field(name="class", default=None)
    behind_s: float = 0.0  # it counted as come this much later, by its class and by what its key had been given


class DecisionList(Struct, frozen=True):
    decisions: list[DecisionRecord]


# ---- GET /sessions


class SessionRow(Struct, frozen=True):
    session: str
    context_tokens: int
    waits_s: float | None = None  # to begin; None: it has begun
    is_here: bool = True  # its client waits; else it was told to come again
    turns: int = 0
    running: int = 0
    gap_s: float | None = None  # before its newest turn
    idle_s: float = 0.0
    replica: str = ""


class ModelSessions(Struct, frozen=True):
    sessions: list[SessionRow]


class SessionList(Struct, frozen=True):
    models: dict[str, ModelSessions]


# ---- POST /explain


class PrefillChoice(Struct, kw_only=True):
    """The place where the prompt would be computed: the chosen replica, or another one."""

    elsewhere: bool
    why: str
    replica: str | None = None
    here_s: float = 0
    here_harm_s: float = 0
    there_s: float = 0
    there_harm_s: float = 0
    transfer_s: float = 0
    threshold_s: float = 0
    candidates: list[Verdict] = []  # those that may compute it


class Explanation(Struct, kw_only=True):
    model: str
    policy: str
    prompt_tokens: float
    exact: bool
    why_not: str | None = None  # why the tokens are not exact
    block_size: int = 0
    blocks: int = 0
    chosen: str | None
    candidates: list[Verdict]
    hits: dict[str, list[tuple[int, int]]] = {}  # ranges of blocks by replica, both ends included
    tokens_exact: bool = False  # the same as `exact`
    index_exact: bool = False  # the chosen replica's cache is known completely
    prediction_exact: bool = False  # its cached tokens follow from both, and from confirmed events alone
    why_inexact: str | None = None  # why one of these is not
    session: str | None = None
    session_from: str | None = None  # the header that names it, or prompt_cache_key
    prefill: PrefillChoice | None = None  # None: no two replicas have roles
