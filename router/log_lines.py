"""A line of the request log: a request, its decisions with their inputs, and its attempts.

Fields that end in `at_s`, and the times of reports, are read from the router's own clock and compare only within one
`run`; `order` sorts the router's actions that have the same time.
"""

from msgspec import Raw, Struct, field

from router.placement.cost import Half, Role

USUAL_TTL_S = 30.0
USUAL_LIMIT = 512
NO_BODY = Raw()  # msgspec leaves out a default by its identity


class Report(Struct, array_like=True, frozen=True, gc=False):
    """The arrival of a native replica's status."""

    ts: float  # the status's own time, unique for the replica
    at_s: float  # the router's clock on arrival
    order: int  # among all changes of the router's figures


class Weighed(Struct, omit_defaults=True, gc=False):
    """One replica in a decision, with its figures of that time. New fields go last with a default; none is renamed."""

    name: str
    cost_s: float | None = None  # None: it could not take the request
    matched_tokens: float = 0  # GPU memory only
    lower_tokens: float | None = None  # tokens in any medium, if more
    queued_tokens: float = 0
    running: int = 0
    waiting: int = 0
    in_flight: int = 0
    prefill_tokens_per_s: float = 0
    empty_tokens: float | None = None
    assigned_tokens: float = 0
    slowness: float = 1
    unavailable: str | None = None
    may_try_anyway: bool = False
    limit: int = USUAL_LIMIT
    max_model_len: int | None = None
    block_tokens: int = 0  # the block size of its events; 0: it is matched by guesses
    cache_block_tokens: int = 0  # the block size that it declares
    cache_blocks: int = 0
    seq: int | None = None  # the last batch of its events that was known; None: none are followed
    inexact: str | None = None  # the reason why the view of its cache may have been incomplete
    report: Report | None = None  # the last that had come
    lost_tokens: float = 0  # cached tokens that it would have evicted, to be computed again
    trust: float = 1  # the factor on its claims of cached tokens
    below: dict[str, float] = {}  # tokens by source: in the GPU or in cheaper sources
    load_tokens_per_s: dict[str, float] = {}  # rates by source, as it reported them
    kv_layout: str = ""  # the layout of its blocks, if neighbours might read them
    readable_tokens: float = 0  # tokens that neighbours might read there
    pulled_tokens: float = 0  # the prompt's first, up to which it would have read from neighbours
    pulled_from: list[str] = []  # the best is first
    role: Role | None = None
    answer_delay_s: float = 0  # by which two answers that ran there delayed each other

    def below_tokens(self) -> dict[str, float]:
        """Tokens by source; older logs say only how many there were in any, and that was mostly host memory."""
        return self.below or ({} if self.lower_tokens is None else {"CPU": self.lower_tokens})


class Decided(Struct, omit_defaults=True):
    order: int
    at_s: float
    policy: str
    lot: int  # the random number that chose among near-equals (`router.placement.policy`)
    turn: int
    chosen: str | None = None
    tried: list[str] = []
    candidates: list[Weighed] = []
    came_s: float | None = None  # all of its body; its place in a replica's queue counts from then
    half: Half = "decode"  # the half that was placed; "prefill": to compute its prompt for another replica
    is_fetched: bool = False  # its KV had been computed elsewhere
    source: str | None = None  # the replica of ours that had computed it, to be read there
    behind_s: float = 0  # it counted as come this much later, by its class, or as its tenant had more than its share
    stood_back: bool = False  # it left room for others


class Sending(Struct, omit_defaults=True):
    replica: str
    sent_order: int
    sent_at_s: float
    uncached_tokens: int = 1
    begun_order: int = -1  # -1: it never was
    begun_at_s: float = 0
    ended_order: int = -1
    ended_at_s: float = 0
    streamed: bool = True  # its first byte is the first token
    fault: str | None = None
    priority_s: float | None = None  # computed as if it had been sent this much later; None: in the replica's own order
    awaited_s: float = USUAL_TTL_S  # how long its expected blocks counted as stored
    fetched_tokens: int = 0  # tokens whose KV came from another replica
    stands_back: bool = False  # who overtakes it harms nobody


class Prefilled(Struct, omit_defaults=True):
    """The half of a request at a replica that computed its prompt for another one."""

    replica: str
    outcome: str
    duration_s: float = 0
    gain_s: float = 0  # estimated
    predicted_tokens: int | None = None
    cached_tokens: int | None = None  # the replica's figure


class LogLine(Struct, kw_only=True, omit_defaults=True):
    """One request. New fields need a default; none is renamed. `body` is present only if prompts may be logged."""

    ts: float  # its arrival, seconds since 1970
    request_id: str
    model: str
    prompt_tokens: int
    output_tokens: int | None = None
    cached_tokens: int | None = None  # the replica's figure
    block_tokens: int = 0  # 0: no blocks are known
    blocks: list[int] = []  # keys of the prompt's full blocks
    status: int = 200
    ttft_s: float | None = None
    duration_s: float = 0.0
    replica: str | None = None
    session: str | None = None
    exact: bool = True  # False: `prompt_tokens` is an estimate
    base_model: str | None = None  # the base, if `model` is an adapter
    client_left: bool = False
    run: str = ""  # identifies the router's process
    at_s: float = 0.0  # its arrival by the router's clock
    decisions: list[Decided] = []
    sendings: list[Sending] = []
    raw_body: Raw = field(default=NO_BODY, name="body")  # `Raw | None` is nothing that msgspec can decode
    index_exact: bool = True  # False: the chosen replica's cache was not known completely
    prediction_exact: bool = True  # False: the replica may find another number than `predicted_tokens`
    predicted_tokens: int | None = None  # cached at the replica; None: only guessed
    prefill: Prefilled | None = None  # None: its prompt was computed where its answer was generated
    further_tokens: int = 0  # tokens of all prompts but the first one, which `prompt_tokens` counts

    @property
    def body(self) -> Raw | None:
        return self.raw_body or None
