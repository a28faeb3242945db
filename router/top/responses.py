"""The router's /metrics, as far as they are shown."""

import re
from collections import defaultdict

from msgspec import Struct


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
