"""One word for how a replica is doing, the worst first."""

from router.top.answers import Replica

LAGGING_BATCHES = 8  # a few are always on their way
STATES = ("down", "draining", "lagging", "partial", "approximate", "exact")
STYLES = {
    "down": "bold red",
    "draining": "cyan",
    "lagging": "bold yellow",
    "partial": "yellow",
    "approximate": "",
    "exact": "green",
}
DRAINING = ("draining", "it drains")  # by an operator's word, by its own


def state_of(replica: Replica) -> str:
    if not replica.available:
        return "draining" if replica.why in DRAINING else "down"
    if replica.state == "syncing" or (replica.events is not None and replica.events.lag_batches >= LAGGING_BATCHES):
        return "lagging"
    return replica.state if replica.state in STATES else "approximate"


def reason_of(replica: Replica) -> str:
    """Why it is not exact, or takes nothing."""
    return (replica.why if not replica.available else replica.inexact) or ""
