"""A trace: requests with their times, lengths and blocks, and no text."""

import random
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from api.process.settings import Unusable
from router.placement.cost import Tenant


class TraceRequest(NamedTuple):
    """Equal numbers in `blocks` are blocks with the same content after the same beginning.

    There is one for each block that the prompt begins; the last may not be full. `output_tokens` are those generated.
    """

    at_s: float  # after the trace's beginning
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    session: str | None = None  # it keeps requests together, where the trace says one
    tenant: Tenant | None = None  # it has a share of the replicas
    replica: int | None = None  # the replica that it went to, where the trace says one


class Trace(Struct, frozen=True):
    """In order of arrival."""

    name: str
    block_tokens: int
    requests: Sequence[TraceRequest]

    @property
    def span_s(self) -> float:
        return self.requests[-1].at_s if self.requests else 0.0

    @property
    def input_tokens(self) -> int:
        return sum(request.input_tokens for request in self.requests)


def coarsened(trace: Trace, factor: int) -> Trace:
    """Blocks `factor` times as large. A block's number says what was before it too, so the last one names them all."""
    if factor == 1:
        return trace
    requests = []
    for request in trace.requests:
        rest = request.blocks[-1:] if len(request.blocks) % factor else ()
        requests.append(request._replace(blocks=(*request.blocks[factor - 1 :: factor], *rest)))
    return replace(trace, block_tokens=trace.block_tokens * factor, requests=requests)


def jittered(trace: Trace, most_s: float, seed: int) -> Trace:
    """Each arrival later by something between nothing and `most_s`, and so some in another order."""
    if not most_s:
        return trace
    chance = random.Random(seed)
    moved = [request._replace(at_s=request.at_s + chance.uniform(0, most_s)) for request in trace.requests]
    return replace(trace, requests=sorted(moved, key=lambda request: request.at_s))


def sped_up(trace: Trace, factor: float) -> Trace:
    requests = [request._replace(at_s=request.at_s / factor) for request in trace.requests]
    return replace(trace, requests=requests)


def at_rate(trace: Trace, input_tokens_per_s: float) -> Trace:
    own = trace.input_tokens / trace.span_s if trace.span_s else 0.0
    if not own:
        raise Unusable(f"{trace.name}: all its requests arrive at once, so it has no rate to change")
    return sped_up(trace, input_tokens_per_s / own)
