"""Why a remembered decision fell on its replica, in words, from the figures that were compared."""

from router.top.answers import Considered, Decision
from router.top.words import duration

BY_POLICY = {"round-robin": "its turn", "random": "by lot", "least-loaded": "least loaded"}


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
    if chosen is None:  # it was chosen before, and could not be again
        return ""
    if not able:
        return "the only one that could"
    return _against(chosen, max(able.values(), key=lambda one: one.matched_tokens), decision)


def _against(chosen: Considered, fullest: Considered, decision: Decision) -> str:
    ahead = chosen.matched_tokens - fullest.matched_tokens
    if ahead > 0:
        return f"most cached, +{ahead:,}"
    if ahead < 0:
        return f"{fullest.name} has +{-ahead:,}, but costs {_dearer(fullest, chosen)} more"
    where = "tied" if chosen.matched_tokens else "cold"
    return f"{where}: {'lowest cost' if _is_cheapest(chosen, decision) else 'by lot'}"


def _dearer(one: Considered, than: Considered) -> str:
    return duration((one.cost_s or 0.0) - (than.cost_s or 0.0))


def _is_cheapest(chosen: Considered, decision: Decision) -> bool:
    costs = [one.cost_s for one in decision.candidates if one.cost_s is not None]
    return chosen.cost_s == min(costs)
