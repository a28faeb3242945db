"""Why a replica has nothing to do, in one sentence."""

from collections.abc import Iterable

from router.members.members import Member
from router.placement.decision import Decision
from router.placement.passed_over import PassedOver, in_words, passed_over


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
