"""`warmroute status`: the desired and the current state of a fleet."""

import contextlib
import time
from collections.abc import Sequence

import click
from rich.console import Console

from fleet.commands.addresses.local_fleets import fleet_argument, locate
from fleet.commands.client import FleetClient
from fleet.commands.picture import draw
from router.console.asking import Client
from router.responses import ReplicaList

PATIENCE_S = 1.0  # the fleet is shown without its routers' words rather than late


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Show the controller's answer as it is.")
@fleet_argument
def status(which: str | None, fleet_key: str | None, as_json: bool) -> int:
    """Show a fleet: its addresses, models and replicas, its problems, and why a ready replica is idle.

    "cached" is the share of a replica's KV cache that holds prefixes, and their tokens; "hits" the share of the
    prompt tokens of the last seconds that came from it; "run" and "wait" count requests, "queued" the prompt tokens
    still to be computed. Columns with equal values for every replica are left out, and so are columns that do not
    fit; --json has all.

    \b
    Examples:
      warmroute status
      watch warmroute status
      warmroute status 10.0.0.5:8790
      warmroute status --json | jq '.replicas[] | select(.life != "ready") | .name'

    Exit status: 0 all replicas are ready, 1 some are not, the controller does not answer, or the fleet is ending.
    """
    where = locate(which, fleet_key)
    with FleetClient(where.url, where.key) as fleet:
        answer = fleet.answer()
        view = fleet.read(answer)
    if as_json:
        click.echo(answer.decode(errors="replace"))
    else:
        named = f"router{'s' * (len(where.routers) > 1)} {', '.join(where.routers)}, " if where.routers else ""
        addresses = f"{named}controller {where.url}"
        console = Console(highlight=False, emoji=False, markup=False)
        draw(console, view, time.time(), addresses, idle_replicas(where.routers))
    return 0 if view.complete else 1


def idle_replicas(routers: Sequence[str]) -> dict[str, str]:
    """Return the reason by name, for replicas that are idle at every router that answers."""
    told: list[dict[str, str]] = []
    for url in routers:
        # A router that demands a key is left out, too.
        with contextlib.suppress(click.ClickException), Client(url, timeout_s=PATIENCE_S) as client:
            replicas = client.get("/replicas", ReplicaList).replicas
            told.append({one.name: one.idle for one in replicas if one.idle and one.available})
    return {name: why for name, why in told[0].items() if all(name in other for other in told)} if told else {}
