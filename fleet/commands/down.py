"""`warmroute down`: end a fleet."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import click

from fleet.commands.addresses import local_fleets
from fleet.commands.addresses.local_fleets import fleet_argument
from fleet.commands.client import FleetClient
from fleet.commands.words import changes
from fleet.control.record import View
from fleet.display import Display
from router.console.asking import Refused, Unreachable

LOOK_S = 0.25
GONE_S = 2.0  # a controller that is silent for this long has ended


@click.command()
@click.option("--all", "everything", is_flag=True, help="End all fleets that this user has started on this machine.")
@click.option("--now", is_flag=True, help="Do not wait for running requests.")
@fleet_argument
def down(everything: bool, now: bool, which: str | None, fleet_key: str | None) -> None:
    """End a fleet: its replicas finish their running requests and leave, then everything else ends.

    On this machine it works as Ctrl-C in `warmroute up`, and --now as a second Ctrl-C; files of a killed fleet are
    removed. A fleet elsewhere is named by the URL of its controller. Where `warmroute up` has joined a running fleet,
    only its router ends; to end the fleet, give the controller's URL.

    \b
    Examples:
      warmroute down
      warmroute down 9000 --now
      warmroute down --all
      warmroute down 10.0.0.5:8790

    Ctrl-C stops waiting; the fleet still ends. Exit status: 0 ended, 1 there is no such fleet.
    """
    if everything and which is not None:
        raise click.UsageError("--all means all fleets of this machine; give either --all or FLEET")
    if everything:
        if not (living := local_fleets.running_fleets()):
            raise click.ClickException("no fleet runs on this machine")
        end_here(living, now)
        return
    where = local_fleets.find(which)
    here = where.local
    if here is not None and not (here.found and which == here.controller):
        end_here([here], now)
    elif now:
        raise click.UsageError(f"--now works only for fleets of this machine, not for {where.url}")
    else:
        with FleetClient(where.url, fleet_key or where.key) as fleet:
            fleet.end()
            wait(f"Ending {fleet.url}", fleet, lambda silent_s: silent_s >= GONE_S)
        click.echo(f"The fleet of {where.url} has ended")


# ---- of this machine


def end_here(fleets: Sequence[local_fleets.LocalFleet], now: bool) -> None:
    for fleet in fleets:
        send_signal(fleet, now)
    for fleet in fleets:
        with FleetClient(fleet.controller, fleet.key) as controller:
            wait(
                f"Ending port {fleet.port}, pid {fleet.pid}",
                None if fleet.found else controller,
                lambda _, fleet=fleet: not local_fleets.is_running(fleet),  # type: ignore[misc]
            )
        local_fleets.running_fleets()  # if it was killed meanwhile, its files are removed
        if fleet.found:
            goes_on = f"the fleet goes on: warmroute down {fleet.controller} ends it"
            click.echo(f"The router of port {fleet.port} has ended; {goes_on}")
        else:
            click.echo(f"The fleet of port {fleet.port} has ended")


def send_signal(fleet: local_fleets.LocalFleet, now: bool) -> None:
    """Signal the process that wrote the fleet's file, unless its id has been reused."""
    if local_fleets.is_running(fleet):
        os.kill(fleet.pid, signal.SIGUSR1 if now else signal.SIGHUP)


# ---- anywhere


def wait(title: str, fleet: FleetClient | None, is_over: Callable[[float], bool]) -> None:
    """Show which replicas leave, until it is over; `is_over` is told how long the controller has been silent."""
    seen: View | None = None
    first, heard_s = 0, time.monotonic()
    try:
        with Display(title) as display:
            display.line(title)
            while not is_over(time.monotonic() - heard_s):
                view = None
                if fleet is not None:
                    with suppress(Unreachable, Refused):
                        view = fleet.view()
                if view is not None:
                    first, heard_s = first or len(view.replicas), time.monotonic()
                    for line in changes(seen, view):
                        display.line(line)
                    display.step(max(0, first - len(view.replicas)), first)
                    seen = view
                time.sleep(LOOK_S)
    except KeyboardInterrupt:
        click.echo("Stopped waiting; the fleet is still ending.", err=True)
        raise
