"""What placing a prompt does beside computing it: whom it goes before, and what it drives out of the cache.

Both are in tokens, so that they can be added to what `router.placement.cost` counts.
"""

from collections.abc import Sequence

from msgspec import Struct

from router.placement.ages import CacheAges
from router.placement.cost import INFINITE, Candidate, Question, uncached_tokens

# What computes little goes first, and nobody starves: a request is overtaken only by what comes soon after it.
PATIENCE = 2.0  # times the time that its own prefill takes
MOST_LATER_S = 60.0
# Near-equals of the best are drawn from, so that routers that see the same reports do not all pick the same replica.
NEAR_S = 0.001
NEAR_FRACTION = 0.05
MOST_LOOKED_AT = 64  # of replicas that cost about the same, for what they would lose; the others lose as the dearest
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
    if True not in [candidate.is_crowded for candidate in candidates]:  # a third of the time of any(...)
        return None
    came_s = question.now_s if question.came_s is None else question.came_s
    found = Effects([0.0] * len(costs), [0.0] * len(costs), [0.0] * len(costs))
    for index, candidate in enumerate(candidates):
        if candidate.queue_positions and costs[index] < INFINITE:
            tokens, rate = uncached_tokens(question, candidate.slot), rates[index]
            later = candidate.queue_positions.later_than(came_s + later_s(tokens, rate))
            if later.prompts:
                # What is on its way there waits, too: who goes before it computes it.
                overtaken = min(later.tokens, candidate.queued_tokens) - question.awaited.get(candidate.slot, 0)
                overtaken = found.overtaken[index] = max(0.0, overtaken)
                delayed = found.delayed[index] = later.prompts * tokens
                costs[index] += candidate.slowness * (delayed - overtaken) / rate
    _add_losses(question, candidates, rates, costs, found)
    return found


def _add_losses(
    question: Question, candidates: Sequence[Candidate], rates: Sequence[float], costs: list[float], found: Effects
) -> None:
    """The cheapest first: whoever is dearer than that already need not be looked at, as a loss is never below 0."""
    accounts: dict[int, CacheAges] = {}
    for index, cost in enumerate(costs):
        if cost < INFINITE:
            ages = candidates[index].ages
            if ages is None or not ages.capacity_pages:
                return  # what is unknown cannot be compared
            accounts[index] = ages
    most, dearest, looked_at = INFINITE, 0.0, 0
    for index in sorted(accounts, key=costs.__getitem__):
        candidate, cost = candidates[index], costs[index]
        if cost > most:
            found.lost[index] = None
            continue
        if looked_at < MOST_LOOKED_AT:
            lost = accounts[index].lost_tokens(uncached_tokens(question, candidate.slot), question.now_s)
            dearest = max(dearest, lost)
            looked_at += 1
        else:
            lost = dearest
        found.lost[index] = lost
        cost += candidate.slowness * LOSS_WEIGHT * lost / rates[index]
        costs[index] = cost
        most = min(most, cost + NEAR_S + NEAR_FRACTION * cost)  # the policy's own slack is a part of that
