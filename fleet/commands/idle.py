"""Why replicas of a fleet are idle, as its routers on this machine say."""

from collections.abc import Sequence

import click

from router.asking import Client
from router.responses import ReplicaList

PATIENCE_S = 1.0  # the fleet is shown without them rather than late


def idle_replicas(routers: Sequence[str]) -> dict[str, str]:
    """Return the reason by name, for replicas that are idle at every router that answers."""
    told = [found for url in routers if (found := _told(url)) is not None]
    if not told:
        return {}
    first, *others = told
    return {name: why for name, why in first.items() if all(name in other for other in others)}


def _told(url: str) -> dict[str, str] | None:
    """Ask one router; None if it does not answer, or demands a key."""
    with Client(url, timeout_s=PATIENCE_S) as client:
        try:
            replicas = client.get("/replicas", ReplicaList).replicas
        except click.ClickException:
            return None
    return {one.name: one.idle for one in replicas if one.idle and one.available}
