"""Why a replica has nothing to do, in one sentence, from remembered decisions: a request pays nothing for it."""

from collections import Counter
from collections.abc import Collection, Iterable

from msgspec import Struct, field

from router.members.members import Member
from router.placement.cost import INFINITE, Candidate
from router.placement.decision import Decision
from router.placement.effects import NEAR_S

MAX_DECISIONS = 200
MAX_LOOKS = 2000  # looks at candidates, about a millisecond: in a fleet of a thousand, the last two decisions
RARE = 0.1  # a replica that is given no more than this part of an even share gets a reason
BY_COST = ("cost", "prefix")  # policies that look for the prompt's tokens


CAUSES = ("warmer", "as good", "unable", "dearer")  # causes of a choice that went elsewhere; the first wins a tie


class PassedOver(Struct):
    """Decisions for which a replica was a candidate, counted by what came of each: `chosen`, or a cause."""

    counts: Counter[str] = field(default_factory=Counter)
    even_share: float = 0.0  # an even share of these choices
    more_tokens: float = 0.0  # tokens of prompts that warmer replicas held, added up
    policy: str = ""  # the policy of the last choice


def passed_over(newest_first: Iterable[Decision], idle: Collection[Candidate]) -> dict[Candidate, PassedOver]:
    """Count the decisions for which these replicas were candidates, within both bounds above."""
    found = {candidate: PassedOver() for candidate in idle}
    looks = MAX_LOOKS
    for _, decision in zip(range(MAX_DECISIONS), newest_first, strict=False):
        if not found or looks <= 0:
            break
        candidates, chosen = decision.candidates, decision.chosen
        looks -= len(candidates)
        if chosen is None:
            continue
        enough = decision.costs[candidates.index(chosen)] + NEAR_S
        for candidate, cost in zip(candidates, decision.costs, strict=True):
            if (one := found.get(candidate)) is None:
                continue
            one.even_share += 1 / len(candidates)
            one.policy = one.policy or decision.policy
            came = "chosen" if candidate is chosen else "unable" if cost == INFINITE else "as good"
            if came == "as good" and cost > enough:
                more = decision.question.reached(chosen.slot) - decision.question.reached(candidate.slot)
                one.more_tokens += max(0.0, more)
                came = "warmer" if more > 0 else "dearer"
            one.counts[came] += 1
    return found


def in_words(found: PassedOver, candidate: Candidate) -> str | None:
    """Say why the replica is given nothing; None: it is given its share."""
    counts = found.counts
    choices = counts.total()
    if not choices:
        return "no prompt came for it"
    if counts["chosen"] > RARE * found.even_share:
        return None
    less = "it was faster, or had less to do"
    if candidate.slowness > 1:
        less = f"this one has come back, and counts {candidate.slowness:.1f} times for now"
    mean = found.more_tokens / (counts["warmer"] or 1)
    cause = {
        "warmer": f"another replica was sooner: it had {mean:,.0f} more tokens of the prompt cached on average",
        "as good": "another replica was as good, and had more empty cache or won the draw",
        "unable": "it could not take the prompt: it was unavailable, full or too small, or had failed before",
        "dearer": f"another replica cost less: {less}",
    }[max(CAUSES, key=lambda cause: counts[cause])]
    if found.policy not in BY_COST:
        cause = f"the policy {found.policy} took another replica"
    missed = choices - counts["chosen"]
    return f"{f'in {missed:,} of the last {choices:,} choices' if choices > 1 else 'in the last choice'} {cause}"


def why_idle(members: Iterable[Member], newest_first: Iterable[Decision]) -> dict[str, str]:
    """Return a sentence for each of the members that is idle, by name. The decisions are those that are remembered."""
    said: dict[str, str] = {}
    able: list[Member] = []
    for member in members:
        one, health = member.candidate, member.health
        if one.unavailable is not None:
            state = "not ready" if health.breaker == "closed" else f"breaker {health.breaker}"
            is_told = health.draining or health.resting is not None
            said[member.name] = one.unavailable if is_told else f"{state}: {one.unavailable}"
        elif not (one.all_in_flight or one.running or one.waiting):
            if member.spec.role == "prefill":
                computed = member.prefills.total()
                said[member.name] = f"role prefill: it only computes prompts for others, {computed:,} so far"
            else:
                able.append(member)
    found = passed_over(newest_first, [member.candidate for member in able])
    words = ((member.name, in_words(found[member.candidate], member.candidate)) for member in able)
    return said | {name: why for name, why in words if why is not None}
