"""`warmroute status`: the desired and the current state of a fleet."""

import contextlib
import time
from collections.abc import Sequence

import click
from rich.console import Console
from rich.live import Live

from fleet.commands.addresses.local_fleets import fleet_argument, locate
from fleet.commands.client import Poller
from fleet.commands.picture import Picture
from fleet.commands.words import age_of
from fleet.control.record import View
from fleet.display import has_cursor
from router.console.asking import Client
from router.responses import ReplicaList

REFRESH_S = 1.0


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Show the controller's answer as it is.")
@click.option("--watch", is_flag=True, help="Show it every second, until Ctrl-C.")
@fleet_argument
def status(which: str | None, fleet_key: str | None, as_json: bool, watch: bool) -> int:
    """Show a fleet: its addresses, models and replicas, its problems, and why a ready replica is idle.

    "cached" is the share of a replica's KV cache that holds prefixes, and their tokens; "hits" the share of the
    prompt tokens of the last seconds that came from it; "run" and "wait" count requests, "queued" the prompt tokens
    still to be computed. Columns with equal values for every replica are left out, and so are columns that do not
    fit; --json has all.

    \b
    Examples:
      warmroute status
      warmroute status --watch
      warmroute status 10.0.0.5:8790
      warmroute status --json | jq '.replicas[] | select(.life != "ready") | .name'

    Exit status: 0 all replicas are ready, 1 some are not, the controller does not answer, or the fleet is ending.
    After --watch it is 0.
    """
    console = Console(highlight=False, emoji=False, markup=False)
    if watch and (as_json or not has_cursor(console)):
        raise click.UsageError("--watch draws on a terminal, without --json; in a script, ask again and again")
    with Poller(lambda: locate(which, fleet_key)) as poller, contextlib.suppress(KeyboardInterrupt):
        answer = poller.fleet.answer()
        view = poller.fleet.read(answer)
        if watch:
            draw_again_and_again(console, poller, view)
            return 0
        if as_json:
            click.echo(answer.decode(errors="replace"))
        else:
            console.print(pictured(poller, view), crop=False)
        return 0 if view.complete else 1
    return 0


def pictured(poller: Poller, view: View, remark: str = "") -> Picture:
    routers = poller.routers
    named = f"router{'s' * (len(routers) > 1)} {', '.join(routers)}, " if routers else ""
    return Picture(view, time.time(), remark, f"{named}controller {poller.fleet.url}", idle_replicas(routers))


def draw_again_and_again(console: Console, poller: Poller, view: View) -> None:
    """Use the alternate screen, so that nothing flickers; the last picture stays in the terminal."""
    picture = pictured(poller, view)
    try:
        with Live(picture, console=console, screen=True, auto_refresh=False) as live:
            live.refresh()
            while True:
                time.sleep(REFRESH_S)
                now = poller.look()
                view = now or view
                away = "" if now else f"The controller has not answered for {age_of(poller.away_s)}: {poller.why}"
                picture = pictured(poller, view, away)
                live.update(picture, refresh=True)
    finally:
        console.print(picture, crop=False)


PATIENCE_S = 1.0  # the fleet is shown without them rather than late


def idle_replicas(routers: Sequence[str]) -> dict[str, str]:
    """Return the reason by name, for replicas that are idle at every router that answers."""
    told: list[dict[str, str]] = []
    for url in routers:
        # A router that demands a key is left out, too.
        with contextlib.suppress(click.ClickException), Client(url, timeout_s=PATIENCE_S) as client:
            replicas = client.get("/replicas", ReplicaList).replicas
            told.append({one.name: one.idle for one in replicas if one.idle and one.available})
    return {name: why for name, why in told[0].items() if all(name in other for other in told)} if told else {}
