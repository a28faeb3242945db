"""Why a replica has nothing to do, in one sentence, from remembered decisions: a request pays nothing for it."""

from collections.abc import Collection, Iterable

from msgspec import Struct

from router.members.members import Member
from router.placement.cost import INFINITE, Candidate
from router.placement.decision import Decision
from router.placement.effects import NEAR_S

MOST_DECISIONS = 200
MOST_LOOKS = 2000  # at candidates, about a millisecond: in a fleet of a thousand, the last two decisions
RARE = 0.1  # of an even share of the choices: a replica that is given no more gets a reason
BY_COST = ("cost", "prefix")  # policies that look for the prompt's tokens


class PassedOver(Struct):
    """Decisions for which a replica was a candidate, and the causes of those that went elsewhere."""

    choices: int = 0
    even_share: float = 0.0  # of these choices
    chosen: int = 0
    unable: int = 0
    warmer: int = 0  # the chosen replica held more of the prompt
    more_tokens: float = 0.0  # that those held, added up
    as_good: int = 0
    policy: str = ""  # of the last choice

    @property
    def is_rare(self) -> bool:
        return self.chosen <= RARE * self.even_share


def passed_over(newest_first: Iterable[Decision], idle: Collection[Candidate]) -> dict[Candidate, PassedOver]:
    """Count the decisions for which these replicas were candidates, within both bounds above."""
    found = {candidate: PassedOver() for candidate in idle}
    looks = MOST_LOOKS
    for _, decision in zip(range(MOST_DECISIONS), newest_first, strict=False):
        if not found or looks <= 0:
            break
        looks -= len(decision.candidates)
        if decision.chosen is not None:
            _count(decision, decision.chosen, found)
    return found


def _count(decision: Decision, chosen: Candidate, found: dict[Candidate, PassedOver]) -> None:
    candidates, question = decision.candidates, decision.question
    reached = question.reached if question.below else lambda slot: question.matched.get(slot, 0)
    held, share = reached(chosen.slot), 1 / len(candidates)
    chosen_cost = decision.costs[candidates.index(chosen)]
    for candidate, cost in zip(candidates, decision.costs, strict=True):
        if (one := found.get(candidate)) is None:
            continue
        one.choices += 1
        one.even_share += share
        one.policy = one.policy or decision.policy
        if candidate is chosen:
            one.chosen += 1
        elif cost == INFINITE:
            one.unable += 1
        elif cost <= chosen_cost + NEAR_S:
            one.as_good += 1
        elif (more := held - reached(candidate.slot)) > 0:
            one.warmer += 1
            one.more_tokens += more


def in_words(found: PassedOver, candidate: Candidate) -> str | None:
    """Say why the replica is given nothing; None: it is given its share."""
    if not found.choices:
        return "no prompt came for it"
    if not found.is_rare:
        return None
    missed = found.choices - found.chosen
    counted = f"in {missed:,} of the last {found.choices:,} choices" if found.choices > 1 else "in the last choice"
    return f"{counted} {_cause(found, candidate, missed)}"


def _cause(found: PassedOver, candidate: Candidate, missed: int) -> str:
    """The commonest cause."""
    if found.policy not in BY_COST:
        return f"the policy {found.policy} took another replica"
    dearer = missed - found.unable - found.warmer - found.as_good
    most = max(found.unable, found.warmer, found.as_good, dearer)
    if most == found.warmer:
        mean = found.more_tokens / found.warmer
        return f"another replica was sooner: it had {mean:,.0f} more tokens of the prompt cached on average"
    if most == found.as_good:
        return "another replica was as good, and had more empty cache or won the draw"
    if most == found.unable:
        return "it could not take the prompt: it was unavailable, full or too small, or had failed before"
    if candidate.slowness > 1:
        return f"another replica cost less: this one has come back, and counts {candidate.slowness:.1f} times for now"
    return "another replica cost less: it was faster, or had less to do"


def why_idle(members: Iterable[Member], newest_first: Iterable[Decision]) -> dict[str, str]:
    """Return a sentence for each of the members that is idle, by name. The decisions are those that are remembered."""
    said: dict[str, str] = {}
    able: list[Member] = []
    for member in members:
        if (kept_away := _kept_away(member)) is not None:
            said[member.name] = kept_away
        elif not _is_busy(member):
            able.append(member)
    found = passed_over(newest_first, [member.candidate for member in able])
    words = ((member.name, _given(member, found[member.candidate])) for member in able)
    return said | {name: why for name, why in words if why is not None}


def _is_busy(member: Member) -> bool:
    one = member.candidate
    return bool(one.all_in_flight or one.running or one.waiting)


def _kept_away(member: Member) -> str | None:
    """Why it takes no requests; None: it takes them."""
    why, health = member.candidate.unavailable, member.health
    if why is None or health.draining or health.resting is not None:
        return why
    if health.breaker == "closed":
        return f"not ready: {why}"
    return f"breaker {health.breaker}: {why}"


def _given(member: Member, found: PassedOver) -> str | None:
    if member.spec.role == "prefill":
        return f"role prefill: it only computes prompts for others, {member.prefills.total():,} so far"
    return in_words(found, member.candidate)
