"""`warmroute restart`: replace the replicas of a model, one after the other."""

import click

from fleet.commands.client import Poller
from fleet.commands.options import fleet_options, locate
from fleet.commands.progress import Step, follow
from fleet.commands.view import View


@click.command()
@click.argument("model")
@click.option("--surge", is_flag=True, help="Start a new one before an old one leaves; needs room for it.")
@click.option("--no-wait", is_flag=True, help="Do not wait until all are new.")
@fleet_options
def restart(model: str, surge: bool, no_wait: bool, which: str | None, fleet_key: str | None) -> None:
    """Replace all replicas of MODEL, one after the other, and wait until all are new.

    Each waits until all others are ready. Replicas with the least valuable caches go first; each finishes
    its running requests, for as long as the model's drain timeout says. A new one has an empty cache.

    \b
    Examples:
      warmroute restart demo
      warmroute restart demo --surge
      warmroute restart demo --no-wait && warmroute status --watch

    Ctrl-C stops waiting, not the restart. Exit status: 0 all are new and ready (with --no-wait: it has begun), 1 it
    cannot be done.
    """
    with Poller(lambda: locate(which, fleet_key)) as poller:
        before = poller.fleet.view()
        generation = poller.fleet.restart(model, int(surge)).generation
        if no_wait:
            click.echo(f"Replacing the replicas of {model} one by one; see `warmroute status`")
            return
        follow(poller, before, model, f"Restarting {model}", lambda view: so_far(view, model, generation))
    click.echo(f"All replicas of {model} are new")


def so_far(now: View, name: str, generation: int) -> Step:
    """Count the replicas of this generation, or a later one, that are ready."""
    model = now.model(name)
    if model is None:
        raise click.ClickException(f"{name} was removed from the fleet meanwhile")
    mine = now.of(name)
    renewed = sum(replica.generation >= generation and replica.life in ("ready", "draining") for replica in mine)
    old = any(replica.generation < generation for replica in mine)
    return Step(min(renewed, model.wanted), model.wanted, not old and renewed >= model.wanted)
