"""Why a decision chose its replica, in words."""

from router.formatting import duration
from router.top.responses import Candidate, Decision

BY_POLICY = {"round-robin": "its turn", "random": "at random", "least-loaded": "least loaded"}


def reason_for(decision: Decision) -> str:
    parts = [decision.why or ""] if decision.status >= 400 or decision.chosen is None else [_chosen(decision)]
    if decision.retries:
        parts.append(f"after {decision.retries} retr{'y' if decision.retries == 1 else 'ies'}")
    if decision.resumes:
        parts.append(f"resumed {decision.resumes} time{'s' * (decision.resumes != 1)}")
    if decision.status == 0:
        parts.append("the client left")
    elif decision.status >= 400:
        parts.append(f"status {decision.status}")
    return ", ".join(part for part in parts if part)


def _chosen(decision: Decision) -> str:
    if decision.policy in BY_POLICY:
        return BY_POLICY[decision.policy]
    able = {one.name: one for one in decision.candidates if one.cost_s is not None}
    chosen = able.pop(decision.chosen or "", None)
    if chosen is None:  # chosen at first, and ineligible at the last decision
        return ""
    if not able:
        return "the only eligible replica"
    return _against(chosen, max(able.values(), key=lambda one: one.matched_tokens), decision)


def _against(chosen: Candidate, fullest: Candidate, decision: Decision) -> str:
    ahead = chosen.matched_tokens - fullest.matched_tokens
    if ahead > 0:
        return f"most cached, +{ahead:,}"
    if ahead < 0:
        return f"{fullest.name} has +{-ahead:,}, but costs {_dearer(fullest, chosen)} more"
    where = "tied" if chosen.matched_tokens else "cold"
    return f"{where}: {'lowest cost' if _is_cheapest(chosen, decision) else 'at random'}"


def _dearer(one: Candidate, than: Candidate) -> str:
    return duration((one.cost_s or 0.0) - (than.cost_s or 0.0))


def _is_cheapest(chosen: Candidate, decision: Decision) -> bool:
    costs = [one.cost_s for one in decision.candidates if one.cost_s is not None]
    return chosen.cost_s == min(costs)
