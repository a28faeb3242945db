"""Placement policies: pure choice, without I/O, clock or state; the reasons are built only on request."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import ceil
from typing import Protocol

from xxhash import xxh3_64_intdigest

from router.placement.cost import (
    INFINITE,
    Candidate,
    Question,
    comparable_rates,
    obstacles,
    uncached_tokens,
    weigh,
)
from router.placement.decision import Decision
from router.placement.effects import MAX_LATER_S, NEAR_FRACTION, NEAR_S, PATIENCE, add_effects
from router.placement.elsewhere import add_pulls

TIE_S = 1e-6
LOAD_BOUND = 1.25  # sessions: most of ours in flight on one replica, as a multiple of the mean
POINTS = 128  # per replica: shares differ by about 1/sqrt(POINTS)
FREE_REQUESTS = 4  # a session stays where so few are in flight


class Ring:
    """A consistent-hash ring: a replica that comes or goes moves only its share of the sessions.

    Points are xxh3 of name and number, so every router draws the same ring.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._points = sorted((_point(f"{name}#{number}"), name) for name in set(names) for number in range(POINTS))

    def walk(self, session: str) -> Iterator[str]:
        """Each replica once, in the order of the ring from the session's point on."""
        points, seen = self._points, set[str]()
        start = bisect_left(points, (_point(session), ""))
        for index in range(start, start + len(points)):
            name = points[index % len(points)][1]
            if name not in seen:
                seen.add(name)
                yield name
                if len(seen) * POINTS == len(points):
                    return


def _point(text: str) -> int:
    return xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))


class Draws(Protocol):
    def random(self) -> float: ...
    def choice(self, seq: Sequence[int], /) -> int: ...


def choose(
    policy: str, question: Question, candidates: Sequence[Candidate], rng: Draws, ring: Ring | None = None
) -> Decision:
    """Choose by one of POLICIES; `session` needs the ring of the candidates' names."""
    pick = POLICIES.get(policy)
    if pick is None:
        raise ValueError(f"policy is {policy!r}; use one of {', '.join(POLICIES)}")
    rates = comparable_rates(candidates)
    weight = 0.0 if policy == "least-loaded" else question.weight
    if question.readable or question.source is not None:
        add_pulls(question, candidates, rates)
    tokens = question.tokens if question.exact else 0
    found = obstacles(candidates, tokens, question.tried, question.anyway, question.half, question.stands_back)
    decision = Decision(policy, question, candidates, rates, weigh(question, candidates, rates, found, weight), weight)
    if None not in found:
        found = [obstacle for obstacle in found if obstacle != "role"]
        if found and all(obstacle == "too_long" for obstacle in found):
            decision.rejection = "too_long"
        elif question.anyway:
            decision.rejection = "unavailable"
        else:
            decision.rejection = "full" if "full" in found else "tried" if "tried" in found else "unavailable"
        return decision
    if policy == "cost":
        decision.effects = add_effects(question, candidates, rates, decision.costs)
    index = pick(decision, rng, ring)
    decision.chosen = chosen = candidates[index]
    decision.uncached_tokens = uncached = uncached_tokens(question, chosen, rates[index])
    overtaken = 0.0 if decision.effects is None else decision.effects.overtaken[index]
    decision.ttft_s = (chosen.queued_tokens - overtaken + uncached) / rates[index]
    if question.below or question.pulls:
        decision.portions = decision.portions_of(index)  # now, as rates change
    if policy == "cost":
        decision.later_s = min(MAX_LATER_S, PATIENCE * uncached / rates[index])
    return decision


# ---- policies: each returns the index of its choice; at least one cost is finite


def _cheapest(decision: Decision, rng: Draws, _: Ring | None, costs: list[float] | None = None) -> int:
    """The lowest cost, near-equals at random; cold prompts on idle replicas go where the most cache is empty."""
    candidates = decision.candidates
    if costs is None:
        costs = decision.costs
    best = min(costs)
    index = costs.index(best)
    # The prompt's own cost is certain; only the queue is an old estimate.
    slack_s = NEAR_S + NEAR_FRACTION * candidates[index].queued_tokens / decision.rates[index]
    most = best + slack_s
    near = [index for index, cost in enumerate(costs) if cost <= most]
    if len(near) == 1:
        return index
    if candidates[index].empty_tokens is not None and max([costs[one] for one in near]) <= best + TIE_S:
        empty = [tokens for index in near if (tokens := candidates[index].empty_tokens) is not None]
        if len(empty) == len(near):  # else unknown figures would be compared
            emptiest = max(empty)
            near = [index for index, tokens in zip(near, empty, strict=True) if tokens == emptiest]
            if len(near) == 1:
                return near[0]
    # Draw two, and take the one with fewer assigned tokens: balanced, and yet unlike another router's choice.
    one = int(rng.random() * len(near))
    other = int(rng.random() * (len(near) - 1))
    first, second = near[one], near[other + (other >= one)]
    return first if candidates[first].assigned_tokens <= candidates[second].assigned_tokens else second


def _longest_prefix(decision: Decision, rng: Draws, _: Ring | None) -> int:
    """The most tokens in any medium; the cheapest of those."""
    question = decision.question
    reached = question.reached if question.below else lambda slot: question.matched.get(slot, 0)
    held = [
        reached(one.slot) if cost < INFINITE else -1
        for one, cost in zip(decision.candidates, decision.costs, strict=True)
    ]
    longest = max(held)
    costs = [cost if tokens == longest else INFINITE for cost, tokens in zip(decision.costs, held, strict=True)]
    return _cheapest(decision, rng, None, costs)


def _by_session(decision: Decision, rng: Draws, ring: Ring | None) -> int:
    """The first replica within the load bound on the session's walk of the ring; without a session, by cost."""
    session = decision.question.session
    if session is not None and ring is not None:
        able = {decision.candidates[index].name: index for index in _able(decision)}
        in_flight = [decision.candidates[index].all_in_flight for index in able.values()]
        most = max(FREE_REQUESTS, ceil(LOAD_BOUND * (sum(in_flight) + 1) / len(able)))
        for name in ring.walk(session):
            index = able.get(name)
            if index is not None and decision.candidates[index].all_in_flight < most:
                return index
    return _cheapest(decision, rng, None)


def _able(decision: Decision) -> list[int]:
    return [index for index, cost in enumerate(decision.costs) if cost < INFINITE]


POLICIES: dict[str, Callable[[Decision, Draws, Ring | None], int]] = {
    "cost": _cheapest,
    "prefix": _longest_prefix,
    "least-loaded": _cheapest,  # costs that leave the prompt out
    "round-robin": lambda decision, _, __: (able := _able(decision))[decision.question.turn % len(able)],
    "random": lambda decision, rng, _: rng.choice(_able(decision)),
    "session": _by_session,
}
