"""The router's responses, as far as they are shown. Unknown fields are ignored, and most fields are optional."""

import re
from collections import defaultdict

from msgspec import Struct

from router.responses import Portion


class Candidate(Struct, frozen=True):
    name: str
    matched_tokens: int = 0
    cost_s: float | None = None  # None: not eligible


class Prefill(Struct, frozen=True):
    """The half of a request at a replica that computed its prompt for another one."""

    replica: str | None = None
    outcome: str | None = None
    why: str = ""
    duration_s: float = 0.0


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
    prediction_exact: bool | None = None  # None: an older router
    why_inexact: str | None = None
    portions: list[Portion] = []  # none: an older router
    prefill: Prefill | None = None


class DecisionList(Struct, frozen=True):
    decisions: list[Decision]


class Totals(Struct, frozen=True):
    """Sums over all replicas and models from GET /metrics."""

    open_requests: float = 0
    queue_length: float = 0
    draining: float = 0
    retries_total: float = 0
    resumes_total: float = 0
    refused_total: float = 0
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
