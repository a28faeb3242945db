"""Effects of a placed prompt on others: it overtakes waiting requests, and evicts cached blocks.

Both are in tokens, so that they can be added to the costs of `router.placement.cost`.
"""

from collections.abc import Sequence
from operator import attrgetter

from msgspec import Struct

from router.placement.ages import CacheAges
from router.placement.cost import INFINITE, Candidate, Question, uncached_tokens
from router.placement.prices import CPU, price

# Short prefills go first, and nobody starves: only requests that come soon after can overtake.
PATIENCE = 2.0  # times the duration of its own prefill
MAX_LATER_S = 60.0
# Draw among near-equals of the best, or routers with the same reports would all pick the same replica.
NEAR_S = 0.001
NEAR_FRACTION = 0.05
MAX_LOOKED_AT = 64  # losses computed among replicas of similar cost; the others count with the largest of these
LOSS_WEIGHT = 2.0  # a token computed again delays as much as one computed now: cost.COMPUTE_WEIGHT


class Effects(Struct, eq=False):
    """Effects of one prompt, parallel to the candidates."""

    overtaken: list[float]  # queued tokens that it goes before
    delayed: list[float]  # extra tokens that others wait for, added up
    lost: list[float | None]  # tokens to compute again, or to bring back, at their price; None: too costly without them


_is_crowded = attrgetter("is_crowded")


def add_effects(
    question: Question, candidates: Sequence[Candidate], rates: Sequence[float], costs: list[float]
) -> Effects | None:
    """Add the effects to the costs, and return them; None: no queue and room everywhere."""
    if True not in map(_is_crowded, candidates):  # a third of the time of any(...)
        return None
    came_s = question.counts_from_s
    found = Effects([0.0] * len(costs), [0.0] * len(costs), [0.0] * len(costs))
    for index, candidate in enumerate(candidates):
        if candidate.queue_positions and costs[index] < INFINITE:
            rate = rates[index]
            tokens = uncached_tokens(question, candidate, rate)
            later = candidate.queue_positions.later_than(came_s + min(MAX_LATER_S, PATIENCE * tokens / rate))
            if later.tokens:
                # Blocks on their way there are queued, too: a prompt that overtakes them computes them itself.
                overtaken = min(later.tokens, candidate.queued_tokens) - question.awaited.get(candidate.slot, 0)
                overtaken = found.overtaken[index] = max(0.0, overtaken)
                delayed = found.delayed[index] = later.prompts * tokens
                costs[index] += candidate.slowness * (delayed - overtaken) / rate
    _add_losses(question, candidates, rates, costs, found)
    return found


def _add_losses(
    question: Question, candidates: Sequence[Candidate], rates: Sequence[float], costs: list[float], found: Effects
) -> None:
    """Add the losses, cheapest candidate first; skip those that cost more already, as a loss is never below 0."""
    accounts: dict[int, CacheAges] = {}
    for index, cost in enumerate(costs):
        if cost < INFINITE:
            ages = candidates[index].ages
            if ages is None or not ages.capacity_pages:
                return  # an unknown rate cannot be compared
            accounts[index] = ages
    most, dearest, looked_at, below = INFINITE, 0.0, 0, question.below.get(CPU)
    for index in sorted(accounts, key=costs.__getitem__):
        candidate, cost = candidates[index], costs[index]
        if cost > most:
            found.lost[index] = None
            continue
        if looked_at < MAX_LOOKED_AT:
            # Tokens are computed again if the prompt takes their room in GPU memory, computed or brought there.
            ages, slot = accounts[index], candidate.slot
            on_gpu = question.matched.get(slot, 0)
            from_host = 0.0 if below is None else max(0.0, below.get(slot, 0) - on_gpu)
            new = max(1.0, question.tokens - on_gpu) + question.further_tokens
            loads = candidate.load_tokens_per_s
            share = price(CPU, loads, rates[index]) if ages.host_pages or CPU in loads else 1.0
            lost = ages.lost_tokens(new, question.now_s, share, from_host)
            dearest = max(dearest, lost)
            looked_at += 1
        else:
            lost = dearest
        found.lost[index] = lost
        cost += candidate.slowness * LOSS_WEIGHT * lost / rates[index]
        costs[index] = cost
        most = min(most, cost + NEAR_S + NEAR_FRACTION * cost)  # includes the policy's own slack
