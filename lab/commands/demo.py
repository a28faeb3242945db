"""The command `warmroute demo`."""

import sys
from contextlib import ExitStack

import click

from api.process.options import option
from fleet.commands.addresses.local_fleets import find, fleet_argument, running_fleets
from fleet.commands.client import FleetClient
from router.process.setting_types import SECRET


@click.command()
@fleet_argument
@option(
    "--api-key", "KEY", "Send this key. Better given as WARMROUTE_API_KEY.", type=SECRET, envvar="WARMROUTE_API_KEY"
)
def demo(which: str | None, fleet_key: str | None, api_key: str | None) -> None:
    """Show what a warm cache saves, and what becomes of an answer whose replica is killed.

    It asks three questions about a document of some 4,000 tokens: the first one is cold, the others are warm. Then it
    kills the replica that is answering a fourth one, and another replica goes on. If no fleet runs on this machine, two
    replicas are started for it, and ended with it. In one that runs already, a replica is killed only if you name the
    FLEET or agree, and only one of smollm2 or demo: it is started again within seconds.

    \b
    Examples:
      warmroute demo
      warmroute demo 8000

    Exit status: 0 shown, 1 something cannot be started or asked, 2 a value cannot be used.
    """
    from lab.bench.probe import target_of  # HTTP clients: not needed to refuse arguments
    from lab.chat.answers import Place
    from lab.chat.scenes import KILLABLE, Demonstration, own_fleet

    with ExitStack() as stack:
        if which is None and not running_fleets():
            local, kills = stack.enter_context(own_fleet()), True
        else:
            found = find(which).local
            if found is None:
                raise click.UsageError(
                    f"{which} is not on this machine, where a replica can be killed; name one that is"
                )
            local, kills = found, which is not None
            if not kills and sys.stdin.isatty():
                kills = click.confirm(f"May a replica of the fleet at port {local.port} be killed?", True)
        fleet = stack.enter_context(FleetClient(local.controller, fleet_key or local.key))
        models = sorted(fleet.view().models, key=lambda model: model.name not in KILLABLE)
        if not models:
            raise click.ClickException(
                f"the fleet at port {local.port} serves no model; end it, and one is started here"
            )
        place = Place(target_of(local.router_url), models[0].serves or models[0].name, api_key)
        Demonstration(place, fleet, kills=kills).run()
