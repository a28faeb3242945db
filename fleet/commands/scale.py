"""`warmroute scale`: how many replicas of a model there should be."""

import click

from fleet.commands.options import fleet_options, locate
from fleet.commands.poller import Poller
from fleet.commands.progress import Step, follow
from fleet.commands.view import View


@click.command()
@click.argument("model")
@click.argument("replicas", metavar="N", type=click.IntRange(min=0))
@click.option("--no-wait", is_flag=True, help="Do not wait until it is so.")
@fleet_options
def scale(model: str, replicas: int, no_wait: bool, which: str | None, fleet_key: str | None) -> None:
    """Have N replicas of MODEL, and wait until it is so.

    New ones get requests when they are ready. If there are too many, those leave whose caches are worth least; their
    running requests finish, for as long as the model's drain timeout says. Where a model is scaled automatically, N is
    to be between its two bounds, and is where that goes on from.

    \b
    Examples:
      warmroute scale demo 4
      warmroute scale demo 0 --no-wait
      warmroute scale llama-3.1-8b 6 --fleet http://10.0.0.5:8790

    Ctrl-C ends the waiting, not the change. Exit status: 0 it is so (with --no-wait: it is wanted), 1 it cannot be, or
    somebody else has changed it meanwhile.
    """
    with Poller(lambda: locate(which, fleet_key)) as poller:
        before = poller.fleet.view()
        poller.fleet.scale(model, replicas)
        if no_wait:
            click.echo(f"{model} is set to {replicas} replicas; see `warmroute status`")
            return
        follow(poller, before, model, f"Scaling {model}", lambda view: so_far(before, view, model, replicas))
    click.echo(f"{model}: {replicas} of {replicas} ready" if replicas else f"{model} has no replicas any more")


def so_far(before: View, now: View, name: str, wanted: int) -> Step:
    """Scaling up, count the ready replicas; scaling down, those that have left."""
    model = now.model(name)
    if model is None:
        raise click.ClickException(f"{name} was removed from the fleet meanwhile")
    if model.wanted != wanted:
        why = f": {model.autoscale_why}" if model.autoscale_why else ""
        raise click.ClickException(f"{name} was set to {model.wanted} replicas meanwhile, instead of {wanted}{why}")
    is_over = model.ready == wanted == model.replicas
    were = len(before.of(name))
    if were > wanted:
        return Step(max(0, were - model.replicas), were - wanted, is_over)
    return Step(min(model.ready, wanted), wanted, is_over)
