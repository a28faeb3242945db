"""The length that a trace needs for its figures to mean anything."""

from itertools import pairwise, takewhile
from math import sqrt
from typing import NamedTuple

from lab.trace.requests import Trace

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
