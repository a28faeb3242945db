"""`warmroute drain`: keep new requests away from a replica, or from all of a node."""

import time
from collections.abc import Collection

import click

from api.settings import FiniteRange
from fleet.commands.client import Fleet, Unreachable
from fleet.commands.options import connect, fleet_options
from fleet.commands.view import ReplicaView
from fleet.commands.words import count

LOOK_S = 0.5
HEARD_S = 2.0  # within which routers have heard of it, and what they have sent before has arrived
NOT_BEGUN = ("placing", "starting", "failing")


@click.command()
@click.argument("replica", required=False)
@click.option("--node", metavar="ADDRESS", help="All replicas on the node of this address, which is about to go.")
@click.option(
    "--wait",
    "wait_s",
    type=FiniteRange(min=0),
    metavar="SECONDS",
    help="Return when they have nothing left to do, after so long at most.",
)
@click.option("--undo", is_flag=True, help="Let them have requests again.")
@fleet_options
def drain(
    replica: str | None, node: str | None, wait_s: float | None, undo: bool, which: str | None, fleet_key: str | None
) -> None:
    """Keep new requests away from REPLICA, which goes on running with what it has, and keeps its cache.

    It still counts as one of its model: none is started in its place. Those of a --node get requests again when they
    have been started anew, on another node for example.

    \b
    Examples:
      warmroute drain demo-2
      warmroute drain demo-2 --undo
      warmroute drain --node 10.0.0.7 --wait 120

    Exit status: 0 done, 1 somebody still had requests when the time to --wait was over, or nobody answers.
    """
    if (replica is None) == (node is None):
        raise click.UsageError("give a REPLICA or --node ADDRESS, one of them")
    if undo and wait_s is not None:
        raise click.UsageError("--undo has nothing to --wait for; leave one of them out")
    with connect(which, fleet_key) as fleet:
        names = _tell(fleet, replica, node, not undo)
        if not names:
            click.echo(f"No replica of this fleet runs at {node}")
            return
        they, it, has = (", ".join(names), *(("get", "have") if len(names) > 1 else ("gets", "has")))
        if undo:
            click.echo(f"{they} {it} requests again")
        elif wait_s is not None:
            _wait(fleet, names, wait_s)
            click.echo(f"{they} {it} no new requests, and {has} nothing left to do")
        else:
            running = sum(each.open_requests for each in _those(fleet, names))
            left = f"{has} {count(running, 'request')} to finish" if running else f"{has} nothing left to do"
            click.echo(f"{they} {it} no new requests, and {left}")
            click.echo(f"To undo it: warmroute drain {replica or f'--node {node}'} --undo")


def _tell(fleet: Fleet, replica: str | None, node: str | None, wanted: bool) -> Collection[str]:
    if node is not None:
        return fleet.drain_node(node, wanted)
    assert replica is not None
    fleet.drain(replica, wanted)
    return (replica,)


def _wait(fleet: Fleet, names: Collection[str], limit_s: float) -> None:
    """Until each was measured, after routers have heard of it, without a request."""
    began_s = time.monotonic()
    before = {each.name: each for each in _those(fleet, names)}
    while True:
        passed_s = time.monotonic() - began_s
        try:
            busy = [each for each in _those(fleet, before) if not _is_idle(each, before[each.name], passed_s)]
            if not busy:
                return
            why = ", ".join(f"{each.name} has {count(each.open_requests, 'request')} left" for each in busy)
        except Unreachable as error:  # it may come back; a node that goes has nothing better to do than to wait
            why = error.format_message()
        if passed_s > limit_s:
            raise click.ClickException(f"after {limit_s:g} s {why}; --wait longer, or let them be cut")
        time.sleep(LOOK_S)


def _is_idle(now: ReplicaView, before: ReplicaView, passed_s: float) -> bool:
    """Of one that is another by now, what it had before is cut."""
    if now.life in NOT_BEGUN or (now.incarnation or before.incarnation) != before.incarnation:
        return True
    return now.serves and not now.open_requests and now.measured_at > before.measured_at and passed_s > HEARD_S


def _those(fleet: Fleet, names: Collection[str]) -> list[ReplicaView]:
    return [each for each in fleet.view().replicas if each.name in names]
