"""`warmroute drain`: keep new requests away from a replica, or from a whole node."""

import time
from collections.abc import Callable, Collection

import click

from api.process.settings import TEXT, FiniteRange
from fleet.commands.addresses.local_fleets import fleet_options, locate
from fleet.commands.client import FleetClient
from fleet.control.record import ReplicaView
from router.console.asking import Refused
from router.console.formatting import count

LOOK_S = 0.5
HEARD_S = 2.0  # routers have heard of it by then, and their earlier requests have arrived
SOONEST_S = 5.0  # replicas cannot be seen idle sooner
NOT_BEGUN = ("placing", "starting", "failing")


@click.command()
@click.argument("replica", required=False)
@click.option("--node", type=TEXT, metavar="ADDRESS", help="Drain all replicas on the node of this address.")
@click.option(
    "--wait", "wait_s", type=FiniteRange(min=0), metavar="SECONDS", help="Wait at most this long until they are idle."
)
@click.option("--undo", is_flag=True, help="Send them requests again.")
@fleet_options
def drain(
    replica: str | None, node: str | None, wait_s: float | None, undo: bool, which: str | None, fleet_key: str | None
) -> None:
    """Keep new requests away from REPLICA; running requests finish, and it keeps its cache.

    It still counts as a replica of its model, so no other one is started. Replicas of a --node get requests again once
    they have restarted, on another node for example.

    \b
    Examples:
      warmroute drain demo-2
      warmroute drain demo-2 --undo
      warmroute drain --node 10.0.0.7 --wait 120

    Exit status: 0 done, 1 requests were left when --wait was over, or the controller does not answer.
    """
    if (replica is None) == (node is None):
        raise click.UsageError("give either a REPLICA or --node ADDRESS")
    if undo and wait_s is not None:
        raise click.UsageError("--wait does not work with --undo; leave one of them out")
    where = locate(which, fleet_key)
    with FleetClient(where.url, where.key) as fleet:

        def tell() -> Collection[str]:
            if node is not None:
                return fleet.drain_node(node, not undo)
            assert replica is not None
            fleet.drain(replica, not undo)
            return (replica,)

        names = tell() if wait_s is None else _wait(fleet, tell, wait_s)
        if not names:
            click.echo(f"No replica of this fleet runs at {node}")
        elif undo:
            replicas = _those(fleet, names)
            kept = [each.name for each in replicas if each.life == "draining"]
            if free := [each.name for each in replicas if each.name not in kept]:
                click.echo(_sentence(free, "requests again"))
            for name in kept:
                click.echo(f"{name} was drained by name and stays drained; undo it with: warmroute drain {name} --undo")
        elif wait_s is not None:
            click.echo(_sentence(names, "no new requests, and", "nothing left to do"))
        else:
            running = sum(each.open_requests for each in _those(fleet, names))
            left = f"{count(running, 'request')} to finish" if running else "nothing left to do"
            click.echo(_sentence(names, "no new requests, and", left))
            click.echo(f"To undo it: warmroute drain {replica or f'--node {node}'} --undo")


def _wait(fleet: FleetClient, tell: Callable[[], Collection[str]], limit_s: float) -> Collection[str]:
    """Wait until each replica is measured without a request, once routers know; return their names.

    The drain is repeated at each look, as more replicas may come to a node. A controller that does not answer, or does
    not know its replicas yet, is waited for.
    """
    began_s = time.monotonic()
    seen: dict[str, tuple[float, ReplicaView]] = {}  # its first sight: the time and its state
    while True:
        try:
            names = tell()
            now_s, there = time.monotonic(), _those(fleet, names)
            busy = []
            for each in there:
                first_s, first = seen.setdefault(each.name, (now_s, each))
                is_replaced = (each.incarnation or first.incarnation) != first.incarnation  # and has lost its requests
                is_measured = each.measured_at != first.measured_at and now_s - first_s > HEARD_S
                is_idle = each.serves and not each.open_requests and is_measured
                if not (each.life in NOT_BEGUN or is_replaced or is_idle):
                    running = each.open_requests
                    left = f"has {count(running, 'request')} left" if running else "was not heard of since"
                    busy.append(f"{each.name} {left}")
            if not busy:
                return names
            why = ", ".join(busy)
        except Refused as error:
            if error.status < 500:
                raise
            why = error.format_message()
        except click.ClickException as error:
            why = error.format_message()
        if time.monotonic() - began_s > max(limit_s, SOONEST_S):
            raise click.ClickException(f"after {limit_s:g} s {why}; --wait longer, or let them be cut")
        time.sleep(LOOK_S)


def _those(fleet: FleetClient, names: Collection[str]) -> list[ReplicaView]:
    return [each for each in fleet.view().replicas if each.name in names]


def _sentence(names: Collection[str], what: str, has: str = "") -> str:
    gets, own = ("get", "have") if len(names) > 1 else ("gets", "has")
    return f"{', '.join(names)} {gets} {what}" + (f" {own} {has}" if has else "")
