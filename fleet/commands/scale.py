"""`warmroute scale`: set how many replicas a model has."""

import click

from fleet.commands.client import Poller
from fleet.commands.options import fleet_options, locate
from fleet.commands.progress import Step, follow
from fleet.commands.view import View


@click.command()
@click.argument("model")
@click.argument("replicas", metavar="N", type=click.IntRange(min=0))
@click.option("--no-wait", is_flag=True, help="Do not wait for the replicas.")
@fleet_options
def scale(model: str, replicas: int, no_wait: bool, which: str | None, fleet_key: str | None) -> None:
    """Set the number of MODEL's replicas to N, and wait until they are ready.

    New replicas get requests when they are ready. When scaling down, those with the least valuable caches leave; their
    running requests finish within the model's drain timeout. For a model with autoscaling, N must be between its
    bounds, and autoscaling continues from there.

    \b
    Examples:
      warmroute scale demo 4
      warmroute scale demo 0 --no-wait
      warmroute scale llama-3.1-8b 6 --fleet 10.0.0.5:8790

    Ctrl-C stops waiting, not the change. Exit status: 0 done (with --no-wait: accepted), 1 refused, or changed by
    someone else meanwhile.
    """
    with Poller(lambda: locate(which, fleet_key)) as poller:
        before = poller.fleet.view()
        poller.fleet.scale(model, replicas)
        if no_wait:
            click.echo(f"{model} is set to {replicas} replicas; see `warmroute status`")
            return
        follow(poller, before, model, f"Scaling {model}", lambda view: so_far(before, view, model, replicas))
    click.echo(f"{model}: {replicas} of {replicas} ready" if replicas else f"{model} has no replicas")


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
