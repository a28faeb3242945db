"""Eligibility: the only place that decides which replicas can take a request now, and why others cannot."""

from collections.abc import Sequence

from router.placement.cost import NONE_TRIED, Candidate, Obstacle
from router.placement.roles import TAKES, Half


def obstacles(
    candidates: Sequence[Candidate],
    tokens: int = 0,
    tried: frozenset[str] = NONE_TRIED,
    anyway: bool = False,
    half: Half = "decode",
    stands_back: bool = False,
) -> list[Obstacle | None]:
    """The obstacle at each candidate; None: it is eligible.

    `tokens`: 0 where the length is an estimate, as no prompt is too long by an estimate. `anyway`: replicas that are
    only believed to be down are eligible, too. `stands_back`: its tenant was given more than its share, and leaves half
    of the room to the others. It runs for every request: one pass, no call per candidate.
    """
    roles, part = TAKES[half], 2 if stands_back else 1
    return [
        "role"
        if one.role not in roles
        else "too_long"
        if (longest := one.max_model_len) is not None and tokens > longest
        else "unavailable"
        if one.unavailable is not None and not (anyway and one.may_try_anyway)
        else "tried"
        if tried and one.name in tried
        else "full"
        if 0 < one.limit <= one.all_in_flight * part
        else None
        for one in candidates
    ]


def can_take(candidate: Candidate, tokens: int = 0, tried: frozenset[str] = NONE_TRIED) -> bool:
    return obstacles((candidate,), tokens, tried) == [None]


def in_words(obstacle: Obstacle | None, candidate: Candidate, tokens: int) -> str | None:
    match obstacle:
        case "role":
            return f"its role is {candidate.role or 'not given'}"
        case "too_long":
            return f"too long: {tokens:,} tokens, its max_model_len is {candidate.max_model_len:,}"
        case "unavailable":
            return candidate.unavailable
        case "tried":
            return "has failed this request before"
        case "full":
            of_limit = f"{candidate.all_in_flight:,} requests in flight, its limit is {candidate.limit:,}"
            return f"full: {of_limit}"
    return None
