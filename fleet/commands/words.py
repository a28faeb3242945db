"""A fleet's figures and states in words."""

from fleet.control.record import ReplicaView, View
from router.console.formatting import count

SOONEST_S = 0.1  # a start that takes less is none to speak of
CAUSES = ("ready", "gone", "leaving")  # another may leave once one is ready, and a new one may start once it is gone


def changes(before: View | None, now: View, model: str | None = None, *, starts: bool = True) -> list[str]:
    """Describe what happened to the replicas of one model, or of all, causes before effects.

    `starts`: also that one starts which has not failed before.
    """
    were = {} if before is None else {replica.name: replica for replica in before.replicas}
    are = {replica.name: replica for replica in now.replicas}
    happenings = []
    for name, replica in are.items():
        is_start = replica.life in ("placing", "starting") and not replica.why
        if model in (None, replica.model) and (starts or not is_start):
            rank = CAUSES.index(replica.life) if replica.life in CAUSES else len(CAUSES)
            happenings.append((rank, _change(were.get(name), replica, first=before is None)))
    for name, replica in were.items():
        if name not in are and model in (None, replica.model):
            happenings.append((CAUSES.index("gone"), [f"{name} is gone"]))
    return [line for _, lines in sorted(happenings, key=lambda each: each[0]) for line in lines]


def _change(was: ReplicaView | None, now: ReplicaView, *, first: bool) -> list[str]:
    """Describe one replica's change; at the first look, a ready one is no news."""
    if was is None and first and now.life == "ready":
        return []
    if was is not None and (was.life, was.why, was.starts or 1) == (now.life, now.why, now.starts or 1):
        return []
    words = [f"  | {word}" for word in now.last_words]
    if now.life == "starting" and now.why:
        return [] if was is not None and was.why == now.why else [f"{now.name} {happened(now)}", *words]
    if now.life == "failing":
        return [f"{now.name} {happened(now)}", *words]
    if now.life == "ready" and now.died_since(was):
        return [f"{now.name} has ended", *words, f"{now.name} is ready again"]
    if now.life == "ready" and was is not None and was.life == "starting" and now.since - was.since >= SOONEST_S:
        return [f"{now.name} is ready after {now.since - was.since:.1f} s"]
    return [f"{now.name} {happened(now)}"]


def happened(replica: ReplicaView) -> str:
    """Describe its state and the reason, to follow its name."""
    why = replica.why
    match replica.life:
        case "placing":
            return f"waits for resources: {why}" if why else "is being placed"
        case "starting":
            return f"restarts; before, it {why}" if why else "starts"
        case "ready":
            return "is ready"
        case "failing":
            return f"{why}; restarting" + (f", after {replica.starts} starts" if replica.starts > 1 else "")
        case "draining":
            return "gets no new requests"
        case "leaving":
            running = replica.open_requests
            return f"finishes {count(running, 'request')} and leaves" if running else "leaves"
        case "lost":
            return f"is unreachable: {why}"
        case life:
            return f"is {life}: {why}" if why else f"is {life}"


def age_of(seconds: float) -> str:
    """Two units at most: `7s`, `5m`, `3h12m`, `9d4h`."""
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if minutes < 1:
        return f"{max(0, int(seconds))}s"
    if hours < 1:
        return f"{minutes}m"
    return f"{hours}h{minutes % 60}m" if days < 1 else f"{days}d{hours % 24}h"
