"""The state of a replica in one word; STATES lists the worst first."""

from router.responses import ReplicaStatus

LAGGING_BATCHES = 8  # a few are always in flight
STATES = ("down", "draining", "lagging", "partial", "approximate", "exact")
STYLES = {
    "down": "bold red",
    "draining": "cyan",
    "lagging": "bold yellow",
    "partial": "yellow",
    "approximate": "",
    "exact": "green",
}
DRAINING = ("draining", "it drains")  # by an operator, by the replica itself


def state_of(replica: ReplicaStatus) -> str:
    if not replica.available:
        return "draining" if replica.why in DRAINING else "down"
    if replica.state == "syncing" or (replica.events is not None and replica.events.lag_batches >= LAGGING_BATCHES):
        return "lagging"
    return replica.state if replica.state in STATES else "approximate"


def reason_of(replica: ReplicaStatus) -> str:
    """Why the replica is unavailable, its index inexact, or nothing is sent to it."""
    if not replica.available:
        return replica.why or ""
    return replica.inexact or (f"idle: {replica.idle}" if replica.idle else "")
