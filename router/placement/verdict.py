"""The figures and the reason of one replica in a decision, as they leave the process: see `router.responses`."""

from msgspec import Struct


class Portion(Struct, frozen=True, gc=False):
    """A part of a prompt, and where a replica takes it from."""

    source: str  # GPU, CPU, STORAGE, PULL (from a neighbour) or COMPUTE
    tokens: float = 0
    seconds: float = 0.0
    neighbours: tuple[str, ...] = ()  # the sources to read it from, the best first


class CostParts(Struct, frozen=True, gc=False):
    """A cost by its reasons, in seconds of the replica's prefill; their sum is the cost."""

    compute_s: float = 0  # weighted: the prompt waits for it, and takes room from a later one
    queue_s: float = 0  # prefill ahead of it, requests being decoded, the surcharge of a replica that just came back
    harm_s: float = 0  # others that wait longer, and evicted blocks that are needed again


class Verdict(Struct):
    """One replica in an explained decision."""

    name: str
    matched_tokens: float = 0
    lower_tokens: float = 0  # those in slower memory included; never less than `matched_tokens`
    sure_tokens: float = 0
    uncached_tokens: float = 0
    queued_tokens: float = 0
    running: int = 0
    in_flight: int = 0
    lost_tokens: float | None = 0
    ttft_s: float | None = None
    cost: float | None = None  # seconds; None: it cannot take the prompt
    available: bool = True
    why: str = ""  # why it was chosen, lost, or cannot be chosen
    portions: tuple[Portion, ...] = ()  # the sources of the prompt's tokens there; none: an older router
    parts: CostParts | None = None  # the parts of its cost; None: it has none, or an older router
