"""The router's /metrics, as far as they are shown."""

from msgspec import Struct

from router.doctor.samples import Samples


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
FIRST_TOKENS = f"{PREFIX}time_to_first_token_seconds_"
SUMS = [name for name in Totals.__struct_fields__ if name != "first_tokens"]
WANTED = {*(f"{PREFIX}{name}" for name in SUMS), f"{FIRST_TOKENS}count", f"{FIRST_TOKENS}sum"}


def totals_of(metrics: str) -> Totals | None:
    """Parse a router's /metrics; None if it is not one. Raises BadMetrics."""
    samples = Samples(metrics, WANTED)
    if samples.total(f"{PREFIX}open_requests") is None:
        return None
    counts, seconds = samples.each(f"{FIRST_TOKENS}count"), samples.each(f"{FIRST_TOKENS}sum")
    first_tokens = {labels: (count, seconds.get(labels, 0.0)) for labels, count in counts.items()}
    return Totals(**{name: samples.total(f"{PREFIX}{name}") or 0.0 for name in SUMS}, first_tokens=first_tokens)
