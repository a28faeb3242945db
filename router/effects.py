"""What placing a prompt does beside computing it: whom it goes before, and what it drives out of the cache.

Both are in tokens, so that they can be added to what `router.cost` counts.
"""

from collections.abc import Sequence

from msgspec import Struct

from router.cost import INFINITE, Candidate, Question, uncached_tokens

# What computes little goes first, and nobody starves: a request is overtaken only by what comes soon after it.
PATIENCE = 2.0  # times the time that its own prefill takes
MOST_LATER_S = 60.0
# Near-equals of the best are drawn from, so that routers that see the same reports do not all pick the same replica.
NEAR_S = 0.001
NEAR_FRACTION = 0.05
LOSS_WEIGHT = 2.0  # a token to be computed again delays as one that is computed now: cost.COMPUTE_WEIGHT


class Effects(Struct, eq=False):
    """Parallel to the candidates."""

    overtaken: list[float]  # tokens that are queued there, and that it does not wait for
    delayed: list[float]  # tokens that others wait for longer, all of them together
    lost: list[float | None]  # tokens that will have to be computed again; None: it is too dear without them


def later_s(tokens: float, rate: float) -> float:
    """By how much later it counts as having come, at a replica that computes in that order."""
    late_s = PATIENCE * tokens / rate
    return late_s if late_s < MOST_LATER_S else MOST_LATER_S


def add_effects(
    question: Question, candidates: Sequence[Candidate], rates: Sequence[float], costs: list[float]
) -> Effects | None:
    """Changes the costs; None: nobody waits, and there is room everywhere."""
    if True not in [candidate.is_crowded for candidate in candidates]:
        return None
    found = Effects([0.0] * len(costs), [0.0] * len(costs), [0.0] * len(costs))
    for index, candidate in enumerate(candidates):
        if candidate.turns and costs[index] < INFINITE:
            tokens, rate = uncached_tokens(question, candidate.slot), rates[index]
            later = candidate.turns.later_than(question.now_s + later_s(tokens, rate))
            if later.prompts:
                overtaken = found.overtaken[index] = min(later.tokens, candidate.queued_tokens)
                delayed = found.delayed[index] = later.prompts * tokens
                costs[index] += candidate.slowness * (delayed - overtaken) / rate
    _add_losses(question, candidates, rates, costs, found)
    return found


def _add_losses(
    question: Question, candidates: Sequence[Candidate], rates: Sequence[float], costs: list[float], found: Effects
) -> None:
    """The cheapest first: whoever is dearer than that already need not be looked at, as a loss is never below 0."""
    cheapest = costs.index(min(costs))
    most = INFINITE
    for index in (cheapest, *range(cheapest), *range(cheapest + 1, len(costs))):
        candidate, cost = candidates[index], costs[index]
        if candidate.ages is None or not candidate.ages.is_full or cost == INFINITE:
            continue
        if cost > most:
            found.lost[index] = None
            continue
        tokens = uncached_tokens(question, candidate.slot)
        if candidate.empty_tokens is not None and candidate.empty_tokens >= tokens:
            continue  # it says so itself
        lost = found.lost[index] = candidate.ages.lost_tokens(tokens, question.now_s)
        cost += candidate.slowness * LOSS_WEIGHT * lost / rates[index]
        costs[index] = cost
        most = min(most, cost + NEAR_S + NEAR_FRACTION * cost)
