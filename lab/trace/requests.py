"""A trace: requests with their times, lengths and blocks, and no text; and whether it is long enough."""

import random
from collections.abc import Sequence
from itertools import pairwise, takewhile
from math import sqrt
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


LONGEST_GAP_S = 120.0  # nobody replays the night until a user comes back


def rest_of_gap_s(gap_s: float, answer_s: float) -> float:
    """Return how long a session is silent in a closed loop, after an answer that took so long."""
    return min(LONGEST_GAP_S, max(0.0, gap_s - answer_s))


def at_rate(trace: Trace, input_tokens_per_s: float) -> Trace:
    own = trace.input_tokens / trace.span_s if trace.span_s else 0.0
    if not own:
        raise Unusable(f"{trace.name}: all its requests arrive at once, so it has no rate to change")
    return sped_up(trace, input_tokens_per_s / own)


# ---- the length that a trace needs for its figures to mean anything

PARTS = 10  # consecutive ones, as requests that come together are alike
T_95 = 2.26  # Student's t for 95 % on both sides, with one degree of freedom less than there are parts
# docs/simulate.md has what logs that pass both are worth.
FEW_REQUESTS = 1000
WIDE = 0.05  # half the width of the interval


class Estimate(NamedTuple):
    """The hit rate of an unlimited cache, and half of its 95 % confidence interval."""

    requests: int
    hit_rate: float
    half: float

    @property
    def is_enough(self) -> bool:
        return self.requests >= FEW_REQUESTS and self.half <= WIDE

    @property
    def enough_requests(self) -> int:
        """About so many would do; an interval narrows with the root of their number."""
        wanted = round(max(FEW_REQUESTS, self.requests * (self.half / WIDE) ** 2))
        return round(wanted, 2 - len(str(wanted)))  # two digits


def found_tokens(trace: Trace) -> list[int]:
    """The tokens of each prompt that a cache finds which forgets nothing."""
    seen: set[int] = set()
    found = []
    for request in trace.requests:
        usable = request.blocks[: (request.input_tokens - 1) // trace.block_tokens]  # the last token is computed
        found.append(sum(1 for _ in takewhile(seen.__contains__, usable)) * trace.block_tokens)
        seen.update(request.blocks[: request.input_tokens // trace.block_tokens])
    return found


def estimated(trace: Trace) -> Estimate:
    found, asked = found_tokens(trace), [request.input_tokens for request in trace.requests]
    rate = sum(found) / sum(asked)
    ends = [len(found) * part // PARTS for part in range(PARTS + 1)]
    # Half of the interval of a ratio of sums, by the deviations of its parts.
    parts = [(sum(found[a:b]), sum(asked[a:b])) for a, b in pairwise(ends)]
    mean = sum(tokens for _, tokens in parts) / PARTS
    squares = sum(((hits - rate * tokens) / mean) ** 2 for hits, tokens in parts)
    return Estimate(len(found), rate, T_95 * sqrt(squares / (PARTS - 1) / PARTS))


def too_short(trace: Trace) -> str | None:
    """Say that a trace is too short, and what would be enough; None: it is long enough."""
    found = estimated(trace)
    if found.is_enough:
        return None
    share = f"{found.hit_rate:.1%}, give or take {found.half * 100:.1f} points"
    return (
        f"{trace.name} is too short to rely on: of the tokens of its {found.requests:,} requests a cache could find "
        f"{share}; at least {found.enough_requests:,} requests like these would be enough"
    )
