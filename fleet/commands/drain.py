"""`warmroute drain`: keep new requests away from a replica."""

import click

from fleet.commands.options import connect, fleet_options
from fleet.commands.words import count


@click.command()
@click.argument("replica")
@click.option("--undo", is_flag=True, help="Let it have requests again.")
@fleet_options
def drain(replica: str, undo: bool, which: str | None, fleet_key: str | None) -> None:
    """Keep new requests away from REPLICA, which goes on running with what it has, and keeps its cache.

    It still counts as one of its model: none is started in its place.

    \b
    Examples:
      warmroute drain demo-2
      warmroute drain demo-2 --undo
    """
    with connect(which, fleet_key) as fleet:
        fleet.drain(replica, not undo)
        if undo:
            click.echo(f"{replica} gets requests again")
            return
        running = sum(each.open_requests for each in fleet.view().replicas if each.name == replica)
    left = f"has {count(running, 'request')} to finish" if running else "has nothing left to do"
    click.echo(f"{replica} gets no new requests; it {left}")
    click.echo(f"To undo it: warmroute drain {replica} --undo")
