"""The outcome of a choice; its reasons are put into words only on request.

The difference of two costs is the sum of its parts: compute, bring, queue, busy, turns, evictions, rate, slow start.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from itertools import repeat
from operator import mul, sub
from typing import Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from router.placement.cost import (
    COMPUTE_WEIGHT,
    INFINITE,
    Candidate,
    Neighbour,
    Prompt,
    Question,
    brought,
    in_words,
    obstacles,
    uncached_tokens,
)
from router.placement.effects import LOSS_WEIGHT, Effects
from router.placement.index import APPROXIMATE, Matches
from router.placement.prices import GPU, PULL, PULL_S

MAX_TOLD = 10  # replicas, in an error
COMPUTE = "COMPUTE"  # a portion's source
TOLD_FRACTION = 0.2  # parts smaller than this share of the whole difference are not worth a word

# Why no replica took it: worth waiting for room; its session may not begin yet; too long for all; failed
# by each; none available.
Rejection: TypeAlias = Literal["full", "held", "too_long", "tried", "unavailable"]


class Portion(Struct, frozen=True, gc=False):
    """A part of a prompt, and where a replica takes it from; like the next two it leaves the process, too."""

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


class Decision(Struct, eq=False, gc=False):
    """A choice. Its figures hold for the moment of choosing: ask for the `verdicts` before the load has changed."""

    policy: str
    question: Question
    candidates: Sequence[Candidate]
    rates: list[float]  # prefill tokens per second to compare with, parallel to candidates
    costs: list[float]  # seconds, parallel to candidates, lower is better; infinite: cannot take it
    weight: float = COMPUTE_WEIGHT  # of a token to compute
    chosen: Candidate | None = None
    ttft_s: float = 0.0  # estimated
    uncached_tokens: float = 1.0  # tokens to compute at the chosen one, those that it brings at their price
    portions: tuple[Portion, ...] = ()  # the prompt's portions at the chosen one, if any: see `chosen_portions`
    later_s: float = 0.0  # added to its arrival time in the order in which the replica computes
    rejection: Rejection | None = None
    effects: Effects | None = None  # None: it has none, or the policy ignores them

    def ahead(self, index: int) -> float:
        """Queued tokens ahead of the prompt at this candidate."""
        overtaken = self.effects.overtaken[index] if self.effects is not None else 0.0
        return self.candidates[index].queued_tokens - overtaken

    def ttft_of(self, index: int) -> float:
        """Estimated time to first token at this candidate."""
        return (self.ahead(index) + self.uncached_of(index)) / self.rates[index]

    def uncached_of(self, index: int) -> float:
        """Tokens to compute at this candidate, those that it brings at their price."""
        return uncached_tokens(self.question, self.candidates[index], self.rates[index])

    def soonest(self) -> tuple[float, float]:
        """Estimated time to first token at the best replica that can take it, and the part that its prompt takes."""
        able = [index for index, cost in enumerate(self.costs) if cost < INFINITE] or range(len(self.costs))
        index = min(able, key=self.ttft_of)
        return self.ttft_of(index), self.uncached_of(index) / self.rates[index]

    @property
    def neighbours(self) -> tuple[Neighbour, ...]:
        """The replicas that the chosen one may read from; the best is first."""
        pull = None if self.chosen is None else self.question.pulls.get(self.chosen.slot)
        return () if pull is None else pull.neighbours

    @property
    def chosen_portions(self) -> tuple[Portion, ...]:
        """The prompt's tokens at the chosen replica by source, as they were when it was chosen."""
        if self.portions or self.chosen is None:
            return self.portions
        return self.portions_of(self.candidates.index(self.chosen))

    def portions_of(self, index: int) -> tuple[Portion, ...]:
        """The prompt's tokens at this candidate by source: in GPU memory, brought from elsewhere, computed."""
        question, candidate, rate = self.question, self.candidates[index], self.rates[index]
        pull = question.pulls.get(candidate.slot)
        on_gpu = min(question.matched.get(candidate.slot, 0), question.tokens - 1)
        portions = [Portion(GPU, on_gpu, 0.0)] if on_gpu > 0 else []
        rest = question.tokens - on_gpu
        if pull is None and not question.below:  # mostly nothing is brought
            rest += question.further_tokens
            return (*portions, Portion(COMPUTE, rest, rest / rate))
        for share, source, found in brought(question, candidate, rate, pull):
            tokens = min(found, rest - 1)  # the last token is always computed
            seconds, names = tokens * share / rate, list[str]()
            if source == PULL and pull is not None:
                seconds, names = seconds + PULL_S, [one.name for one in pull.neighbours]
            portions.append(Portion(source, tokens, seconds, tuple(names)))
            rest -= tokens
        rest += question.further_tokens
        return (*portions, Portion(COMPUTE, rest, rest / rate))

    def priority_s(self, now_s: float) -> float:
        """Its rank at a replica that computes by rank, in seconds from now: `later_s` less its time since arrival."""
        return self.later_s - (now_s - self.question.counts_from_s)

    def harms_s(self) -> "array[float] | None":
        """The part of each cost that is harm to others; None: there is none."""
        effects = self.effects
        if effects is None:
            return None
        losses = (
            (delayed + LOSS_WEIGHT * (lost or 0.0)) for delayed, lost in zip(effects.delayed, effects.lost, strict=True)
        )
        return array("f", (tokens / rate for tokens, rate in zip(losses, self.rates, strict=True)))

    def parts_of(self, index: int, harm_s: float) -> CostParts | None:
        """The parts of this candidate's cost; None if it cannot take the prompt.

        The queue is what the other two leave: its length has changed since the decision.
        """
        cost_s, rate = self.costs[index], self.rates[index]
        if cost_s == INFINITE:
            return None
        compute_s = min(cost_s, self.weight * self.uncached_of(index) / rate)
        harm_s = min(cost_s - compute_s, harm_s)
        return CostParts(compute_s, cost_s - compute_s - harm_s, harm_s)

    def verdicts(self) -> Iterator[Verdict]:
        """Explain the choice, replica by replica."""
        winner, question, effects = self.chosen, self.question, self.effects
        for index, (one, harm_s) in enumerate(zip(self.candidates, self.harms_s() or repeat(0.0), strict=False)):
            cost_s, obstacle = self.costs[index], self.obstacle(one)
            if one is winner:
                match self.policy:
                    case "round-robin":
                        why = "chosen: its turn"
                    case "session" if question.session is not None:
                        why = "chosen: the session's place on the ring"
                    case "prefix":
                        why = f"chosen: holds {question.reached(one.slot):,.0f} tokens"
                    case "random":
                        why = "chosen: by lot"
                    case _:
                        is_lowest = cost_s == min(self.costs)
                        why = f"chosen: {'lowest cost' if is_lowest else 'by lot among near-equals'}"
            elif obstacle is not None:
                why = obstacle
            else:
                why = "can take it by now" if winner is None else _why_lost(self, one, winner)
            yield Verdict(
                name=one.name,
                matched_tokens=question.matched.get(one.slot, 0),
                lower_tokens=question.reached(one.slot),
                uncached_tokens=self.uncached_of(index),
                queued_tokens=one.queued_tokens,
                running=one.running,
                in_flight=one.all_in_flight,
                lost_tokens=effects.lost[index] if effects is not None else 0.0,
                ttft_s=self.ttft_of(index),
                cost=cost_s if cost_s < INFINITE else None,
                available=one.unavailable is None,
                why=why,
                portions=self.portions_of(index),
                parts=self.parts_of(index, harm_s),
            )

    def at_rest(self) -> "Decision":
        """Copy the decision with its candidates as they are now, to be explained later."""
        candidates = list(map(copy, self.candidates))
        chosen = None if self.chosen is None else candidates[self.candidates.index(self.chosen)]
        return replace(self, candidates=candidates, chosen=chosen)

    def obstacle(self, candidate: Candidate) -> str | None:
        """The reason why a candidate cannot take the prompt now; None if it can."""
        question = self.question
        tokens = question.tokens if question.exact else 0
        [found] = obstacles((candidate,), tokens, question.tried, question.anyway, question.half, question.stands_back)
        return in_words(found, candidate, question.tokens)

    def refusal(self) -> str:
        """The reason why no replica took it, for an error message."""
        if not self.candidates:
            return "no replica serves this model"
        if self.rejection == "held":
            return "more sessions are active than the caches of its replicas hold, and others came before this one"
        if self.rejection == "too_long":
            longest = max(candidate.max_model_len or 0 for candidate in self.candidates)
            found = f"the prompt has {self.question.tokens} tokens; send at most {longest - 1}"
            return f"This model's maximum context length is {longest} tokens. However, {found}"
        obstacles = ((one.name, self.obstacle(one)) for one in self.candidates[:MAX_TOLD])
        reasons = "; ".join(f"{name}: {why or 'has room by now'}" for name, why in obstacles)
        if (more := len(self.candidates) - MAX_TOLD) > 0:
            reasons += f"; and {more:,} more"
        return f"none of {len(self.candidates)} replicas can take the request: {reasons}"


def _why_lost(decision: Decision, loser: Candidate, winner: Candidate) -> str:
    """The reason of the policy, or the extra costs of the loser over the winner, the largest part first."""
    match decision.policy:
        case "round-robin" | "random":
            return f"it was {winner.name}'s turn" if decision.policy == "round-robin" else "not drawn"
        case "session" if decision.question.session is not None:
            return f"{winner.name} is the session's place on the ring"
        case "prefix":
            missing = decision.question.reached(winner.slot) - decision.question.reached(loser.slot)
            if missing > 0:
                return f"holds {missing:,.0f} tokens less"
    one, other = decision.candidates.index(loser), decision.candidates.index(winner)
    loser_rate, winner_rate = decision.rates[one], decision.rates[other]
    weight, price, effects = decision.weight, decision.question.busy_tokens, decision.effects
    weights = (weight, weight, 1.0, price, 1.0, LOSS_WEIGHT)

    def amounts(index: int) -> list[float]:
        """Return the amounts that these weights are for."""
        each, computed = decision.candidates[index], decision.portions_of(index)[-1].tokens
        delayed, lost = (0.0, None) if effects is None else (effects.delayed[index], effects.lost[index])
        busy, brought = max(each.running, each.all_in_flight), decision.uncached_of(index) - computed
        return [computed, brought, decision.ahead(index), busy, delayed, lost or 0.0]

    more = list(map(sub, amounts(one), amounts(other)))
    loser_tokens, winner_tokens = (sum(map(mul, weights, amounts(index))) for index in (one, other))
    compute, bring, queue, busy, delay, loss = more
    words = (
        f"would compute {compute:,.0f} tokens more",
        f"would bring blocks for {bring / loser_rate:.3f} s longer",
        f"queue {queue:,.0f} tokens longer",
        f"{busy:,} more requests running",
        f"others would wait {delay / loser_rate:.1f} s longer, added up",
        f"would drive out {loss:,.0f} tokens more that come again",
    )
    slower = f"prefills {1 - loser_rate / winner_rate:.0%} slower"
    starting_s = (loser.slowness - 1) * loser_tokens / loser_rate - (winner.slowness - 1) * winner_tokens / winner_rate
    parts = [(each * tokens / loser_rate, said) for each, tokens, said in zip(weights, more, words, strict=True)]
    parts.append((winner_tokens * (1 / loser_rate - 1 / winner_rate), slower))
    parts.append((starting_s, f"slow start: counts {loser.slowness:.1f} times"))
    parts.sort(reverse=True)
    dearer = sum(seconds for seconds, _ in parts if seconds > 0)
    told = [words for seconds, words in parts if seconds > TOLD_FRACTION * dearer]
    return ", ".join(told) if sum(seconds for seconds, _ in parts) > 0 else f"as good; the lot fell on {winner.name}"


# ---- the cache hit to be expected


class Prediction(Struct, frozen=True, gc=False):
    """The leading blocks of a prompt that the chosen replica should find in its cache."""

    block_size: int
    blocks: int
    claimed_blocks: int  # those by its events alone
    sure: bool  # it rests on events alone, and on blocks that need not be brought
    alone: bool = True  # no request of ours is under way there, which may store and evict blocks meanwhile
    pulls: bool = False  # the replica may read more from neighbours
    brought_blocks: int = 0  # those of the claimed ones that may not come in time

    @property
    def tokens(self) -> int:
        return self.blocks * self.block_size


def predict(prompt: Prompt, decision: Decision, block_size: int, matches: Mapping[int, Matches]) -> Prediction | None:
    """Predict the hit at the chosen replica; None: only guessed.

    Nobody claims what it may read from neighbours, or what it would rather compute than bring.
    """
    chosen = decision.chosen
    if chosen is None or block_size == APPROXIMATE or not prompt.exact:
        return None
    found, slot = matches[block_size], chosen.slot
    most = (prompt.tokens - 1) // block_size  # the last token is always computed
    rate = decision.rates[decision.candidates.index(chosen)] if found.below else 0.0
    sources = {source for _, source, _ in brought(decision.question, chosen, rate, None)} if found.below else set()
    levels = [level for source, level in found.below if source in sources]
    held = (found.lower, found.gpu, found.sure, *levels)
    lower, gpu, sure, *reached = (min(blocks.get(slot, 0), most) for blocks in held)
    blocks = max(gpu, *reached, 0)
    # Nobody has claimed blocks that are still on their way; only lower media can reach beyond them.
    claimed = blocks if blocks > gpu else sure
    pulls = bool(decision.neighbours)
    is_sure, alone = lower == blocks == sure and not pulls, not chosen.all_in_flight
    return Prediction(block_size, blocks, claimed, is_sure, alone, pulls, claimed - sure)
