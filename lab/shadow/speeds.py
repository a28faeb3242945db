"""Size and speed of the watched replicas, as far as they tell; what they do not tell is assumed, and named."""

from collections.abc import Iterable, Sequence
from statistics import fmean

from msgspec import Struct
from msgspec.structs import replace

from lab.shadow.engines import Counted
from lab.shadow.following import Followed
from lab.simulation.settings import Settings

USUAL = Settings()
USUAL_OUTPUT_TOKENS = 128
ASSUMED_RATE = f"{USUAL.prefill_tokens_per_s:,.0f} prefill tokens/s in each replica; give --prefill-rate"


class Speeds(Struct, frozen=True, kw_only=True):
    """Means over the replicas; `assumed` says in words what nobody told."""

    capacity_tokens: int
    prefill_tokens_per_s: float  # as told, or counted
    pace_tokens_per_s: float  # of the twin, which computes one prompt at a time
    decode_tokens_per_s: float
    output_tokens: int  # of an answer whose length is unknown
    assumed: tuple[str, ...] = ()


def speeds_of(
    replicas: Sequence[Followed],
    counted: Counted,
    *,
    capacity_tokens: int | None = None,
    prefill_tokens_per_s: float | None = None,
) -> Speeds:
    """`counted`: the counters of all replicas together; the other two are what the user says."""
    gap_s = counted.between_tokens_s.value
    capacity = capacity_tokens or _mean(one.capacity_tokens for one in replicas)
    rate = prefill_tokens_per_s or _mean(one.prefill_tokens_per_s for one in replicas) or _counted_rate(counted)
    assumed = []
    if capacity is None:
        assumed.append(f"{USUAL.capacity_tokens:,} tokens of KV cache in each replica; give --capacity-tokens")
    if rate is None:
        assumed.append(ASSUMED_RATE)
    return Speeds(
        capacity_tokens=int(capacity or USUAL.capacity_tokens),
        prefill_tokens_per_s=rate or USUAL.prefill_tokens_per_s,
        pace_tokens_per_s=rate or USUAL.prefill_tokens_per_s,
        decode_tokens_per_s=1 / gap_s if gap_s else USUAL.decode_tokens_per_s,
        output_tokens=round(counted.output_tokens.value or USUAL_OUTPUT_TOKENS),
        assumed=tuple(assumed),
    )


def at_pace(speeds: Speeds, pace_tokens_per_s: float) -> Speeds:
    """Take a pace that was fitted to measured times; it is the replicas' rate if nobody told that."""
    others = tuple(each for each in speeds.assumed if each != ASSUMED_RATE)
    rate = speeds.prefill_tokens_per_s if others == speeds.assumed else pace_tokens_per_s
    return replace(speeds, pace_tokens_per_s=pace_tokens_per_s, prefill_tokens_per_s=rate, assumed=others)


def _mean(values: Iterable[float]) -> float | None:
    known = [value for value in values if value > 0]
    return fmean(known) if known else None


def _counted_rate(counted: Counted) -> float | None:
    """Computed tokens by the seconds of their prefill; too low if several prompts are computed at once."""
    computed = counted.query_tokens - counted.hit_tokens
    return computed / counted.prefill_s if counted.prefill_s > 0 and computed > 0 else None
