"""`warmroute down`: end a fleet."""

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

import click
import msgspec

from fleet.commands.addresses import local_fleets
from fleet.commands.client import FleetClient
from fleet.commands.options import fleet_argument
from fleet.commands.view import View
from fleet.commands.words import changes
from fleet.display import Display
from router.console.asking import Refused, Unreachable

LOOK_S = 0.25
BETWEEN_SIGNALS_S = 3.0  # two at once would count as one
STUCK_S = 15.0
GONE_S = 2.0  # a controller that is silent for so long has ended


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
    killed = [fleet for fleet in local_fleets.recorded_fleets() if not local_fleets.is_running(fleet)]
    living = local_fleets.running_fleets()  # it removes leftovers, and says so
    if everything and not living and not killed:
        raise click.ClickException("no fleet runs on this machine")
    if everything:
        end_here(living, now)
    elif not was_meant(which, killed) or was_meant(which, living):
        end_one(local_fleets.find(which), which, fleet_key, now)


def was_meant(which: str | None, fleets: Sequence[local_fleets.LocalFleet]) -> bool:
    return any(which in (None, str(fleet.port)) for fleet in fleets)


# ---- of this machine


def end_one(where: local_fleets.Where, which: str | None, fleet_key: str | None, now: bool) -> None:
    here = where.local
    if here is not None and not (here.found and which == here.controller):
        end_here([here], now)
    elif now:
        raise click.UsageError(f"--now works only for fleets of this machine, not for {where.url}")
    else:
        with FleetClient(where.url, fleet_key or where.key) as fleet:
            end_there(fleet)


def end_here(fleets: Sequence[local_fleets.LocalFleet], now: bool) -> None:
    for fleet in fleets:
        ask_to_end(fleet, now)
    try:
        for fleet in fleets:
            wait_here(fleet, now)
    except KeyboardInterrupt:
        click.echo("Stopped waiting; the fleet is still ending. `warmroute down --now` ends it at once.", err=True)
        raise


def ask_to_end(fleet: local_fleets.LocalFleet, now: bool) -> None:
    """Send SIGTERM. A second one means at once, so a second `down` only waits, unless with --now."""
    if not fleet.ending:
        if local_fleets.is_running(fleet):
            local_fleets.record_fleet(
                msgspec.structs.replace(fleet, ending=True)
            )  # before: asked, it removes this file in the end
        send_signal(fleet)
        if now:  # two signals that arrive together are one
            time.sleep(BETWEEN_SIGNALS_S)
    if now:
        send_signal(fleet)


def send_signal(fleet: local_fleets.LocalFleet) -> None:
    """Signal the process that wrote the fleet's file, unless its id has been reused."""
    if local_fleets.is_running(fleet):
        os.kill(fleet.pid, signal.SIGTERM)


def wait_here(fleet: local_fleets.LocalFleet, now: bool) -> None:
    title = f"Ending port {fleet.port}"
    began_s, said = time.monotonic(), False
    with FleetClient(fleet.controller, fleet.key) as controller, Display(title) as display:
        display.line(f"{title}, pid {fleet.pid}")
        running = DownProgress(controller, display)
        while local_fleets.is_running(fleet):
            if not fleet.found:
                running.look()
            if now and not said and time.monotonic() - began_s > STUCK_S:
                display.line(f"It does not end. Kill it with: kill -9 {fleet.pid}; warmroute down")
                said = True
            time.sleep(LOOK_S)
    killed = any(each.pid == fleet.pid for each in local_fleets.recorded_fleets())  # it has not removed its file
    if killed:
        local_fleets.clean_up(fleet)
    click.echo(ended(fleet, killed))


def ended(fleet: local_fleets.LocalFleet, killed: bool) -> str:
    how = "was killed; its files are removed" if killed else "has ended"
    if not fleet.found:
        return f"The fleet of port {fleet.port} {how}"
    goes_on = f"the fleet goes on: warmroute down {fleet.controller} ends it"
    return f"The router of port {fleet.port} {how}; {goes_on}"


# ---- elsewhere


def end_there(fleet: FleetClient) -> None:
    fleet.end()
    try:
        with Display(f"Ending {fleet.url}") as display:
            running = DownProgress(fleet, display)
            while running.silent_s < GONE_S:
                running.look()
                time.sleep(LOOK_S)
    except KeyboardInterrupt:
        click.echo("Stopped waiting; the fleet is still ending.", err=True)
        raise
    click.echo(f"The fleet of {fleet.url} has ended")


@dataclass
class DownProgress:
    """Shows the remaining replicas of an ending fleet."""

    fleet: FleetClient
    display: Display
    seen: View | None = None
    first: int = 0
    silent_since_s: float | None = None

    @property
    def silent_s(self) -> float:
        return 0.0 if self.silent_since_s is None else time.monotonic() - self.silent_since_s

    def look(self) -> None:
        try:
            view = self.fleet.view()
        except (Unreachable, Refused):
            self.silent_since_s = self.silent_since_s or time.monotonic()
            return
        self.silent_since_s = None
        if self.seen is None:
            self.first = len(view.replicas)
        for line in changes(self.seen, view):
            self.display.line(line)
        self.display.step(max(0, self.first - len(view.replicas)), self.first)
        self.seen = view
