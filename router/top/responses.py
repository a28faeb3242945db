"""The router's responses, as far as they are shown. Unknown fields are ignored, and most fields are optional."""

import re
from collections import defaultdict

from msgspec import Struct


class Load(Struct, frozen=True):
    queued_tokens: float = 0
    running: int = 0
    waiting: int = 0
    in_flight: int = 0
    prefill_tokens_per_s: float = 0.0
    empty_tokens: float | None = None
    total_blocks: int | None = None  # None: unknown


class Index(Struct, frozen=True):
    blocks: dict[str, int] = {}  # by medium
    accuracy: float = 1.0


class Events(Struct, frozen=True):
    connected: bool = True
    last_event_age_s: float | None = None
    lag_batches: int = 0
    seq: int = -1
    gaps: int = 0
    lost_batches: int = 0
    replays: int = 0
    snapshots: int = 0
    reconnects: int = 0
    restarts: int = 0
    digest_mismatches: int = 0

    @property
    def repairs(self) -> int:
        return self.replays + self.snapshots


class Served(Struct, frozen=True):
    """Counts since the router added the replica."""

    requests: int = 0
    prompt_tokens: int = 0
    matched_tokens: int = 0


class ReplicaStatus(Struct, frozen=True):
    """A replica in GET /replicas."""

    name: str
    url: str = ""
    engine: str = "auto"
    models: list[str] = []
    available: bool = True
    why: str | None = None
    state: str = "approximate"
    inexact: str | None = None
    tokenizer: str | None = None
    isolation: str | None = None
    block_size: int | None = None
    max_model_len: int | None = None
    incarnation: int | str | None = None
    breaker: str = "closed"
    slowness: float = 1.0
    load: Load = Load()
    index: Index = Index()
    events: Events | None = None
    heard_age_s: float | None = None
    served: Served = Served()


class ReplicaList(Struct, frozen=True):
    replicas: list[ReplicaStatus]


class Candidate(Struct, frozen=True):
    name: str
    matched_tokens: int = 0
    cost_s: float | None = None  # None: not eligible


class Decision(Struct, frozen=True):
    """A decision in GET /decisions."""

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
    why: str | None = None
    candidates: list[Candidate] = []


class DecisionList(Struct, frozen=True):
    decisions: list[Decision]


class Totals(Struct, frozen=True):
    """Sums over all replicas and models from GET /metrics."""

    open_requests: float = 0
    queue_length: float = 0
    index_bytes: float = 0
    draining: float = 0
    retries_total: float = 0
    resumes_total: float = 0
    refused_total: float = 0
    client_disconnects_total: float = 0
    approximate_prompts_total: float = 0
    resyncs_total: float = 0
    faults_total: float = 0
    first_tokens: dict[str, tuple[float, float]] = {}  # by labels: count and total seconds


PREFIX = "warmroute_router:"
FIRST_TOKENS = "time_to_first_token_seconds_"
SUMS = [name for name in Totals.__struct_fields__ if name != "first_tokens"]
# A thousand replicas have tens of thousands of lines: one regular expression is faster than parsing all of them.
_WANTED = re.compile(rf"^{PREFIX}({'|'.join(SUMS)}|{FIRST_TOKENS}(?:count|sum))(\{{.*\}})? (\S+)$", re.MULTILINE)


def totals_of(metrics: str) -> Totals | None:
    """Parse a router's /metrics; None if it is not one. Raises ValueError for a value that is not a number."""
    sums: dict[str, float] = defaultdict(float)
    counts: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for name, labels, value in _WANTED.findall(metrics):
        if name.startswith(FIRST_TOKENS):
            (counts if name.endswith("count") else seconds)[labels] = float(value)
        else:
            sums[name] += float(value)
    first_tokens = {labels: (count, seconds.get(labels, 0.0)) for labels, count in counts.items()}
    return Totals(**sums, first_tokens=first_tokens) if "open_requests" in sums else None
