"""`warmroute scale` and `warmroute restart`: change a model's replicas, and follow the change until it is done."""

import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import click

from fleet.commands.addresses.local_fleets import fleet_options, locate
from fleet.commands.client import CONTROLLER, Poller
from fleet.commands.words import changes
from fleet.control.record import ModelView, View
from fleet.display import Display
from router.console.asking import Unreachable
from router.console.formatting import count

LOOK_S = 0.25
MISSING_S = 60.0  # a controller that was restarted has answered by then


class Step(NamedTuple):
    done: int
    of: int
    is_over: bool


def follow(poller: Poller, before: View, name: str, title: str, step: Callable[[View, ModelView], Step]) -> None:
    """Show a model's progress until `step` reports the end; Ctrl-C stops waiting, not the change."""
    seen = before
    try:
        with Display(title) as display:
            while True:
                view = poller.look()
                if view is None:
                    if poller.away_s > MISSING_S:
                        raise Unreachable(CONTROLLER, poller.fleet.url, poller.why)
                    if poller.is_news:
                        display.line(f"The controller does not answer ({poller.why}); retrying")
                else:
                    for line in changes(seen, view, name):
                        display.line(line)
                    if view.ending:
                        raise click.ClickException("the fleet is ending")
                    model = view.model(name)
                    if model is None:
                        raise click.ClickException(f"{name} was removed from the fleet meanwhile")
                    done, of, is_over = step(view, model)
                    display.step(done, of)
                    if is_over:
                        return
                    seen = view
                time.sleep(LOOK_S)
    except KeyboardInterrupt:
        click.echo("Stopped waiting; the change stays in effect. See `warmroute status`.", err=True)
        raise


@click.command()
@click.argument("model")
@click.argument("replicas", metavar="N", type=click.IntRange(min=0))
@click.option("--no-wait", is_flag=True, help="Do not wait for the replicas.")
@click.option("--yes", is_flag=True, help="Scale to 0 without a question; needed where nobody can answer one.")
@fleet_options
def scale(model: str, replicas: int, no_wait: bool, yes: bool, which: str | None, fleet_key: str | None) -> None:
    """Set the number of MODEL's replicas to N, and wait until they are ready.

    New replicas get requests when they are ready. When scaling down, those with the least valuable caches leave; their
    running requests finish within the model's drain timeout. For a model with autoscaling, N must be between its
    bounds, and autoscaling continues from there.

    \b
    Examples:
      warmroute scale demo 4
      warmroute scale demo 0 --yes --no-wait
      warmroute scale llama-3.1-8b 6 --fleet 10.0.0.5:8790

    Ctrl-C stops waiting, not the change. Exit status: 0 done (with --no-wait: accepted), 1 refused, or changed by
    someone else meanwhile.
    """
    with Poller(lambda: locate(which, fleet_key)) as poller:
        before = poller.fleet.view()
        now = before.model(model)  # None: the controller says that there is none
        if replicas == 0 and not yes and now is not None and now.wanted:
            them = count(now.wanted, "replica")
            effect = f"this ends {them} of {model}, and requests for it fail until you scale it up"
            if not sys.stdin.isatty():
                raise click.UsageError(f"{effect}; give --yes")
            click.confirm(f"{effect[0].upper()}{effect[1:]}. Go on?", abort=True, err=True)
        poller.fleet.scale(model, replicas)
        if no_wait:
            click.echo(f"{model} is set to {replicas} replicas; see `warmroute status`")
            return
        were = len(before.of(model))
        follow(poller, before, model, f"Scaling {model}", lambda _, now: scaled_so_far(were, now, replicas))
    click.echo(f"{model}: {replicas} of {replicas} ready" if replicas else f"{model} has no replicas")


def scaled_so_far(were: int, model: ModelView, wanted: int) -> Step:
    """Scaling up, count the ready replicas; scaling down, those that have left."""
    if model.wanted != wanted:
        why = f": {model.autoscale_why}" if model.autoscale_why else ""
        raise click.ClickException(
            f"{model.name} was set to {model.wanted} replicas meanwhile, instead of {wanted}{why}"
        )
    is_over = model.ready == wanted == model.replicas
    if were > wanted:
        return Step(max(0, were - model.replicas), were - wanted, is_over)
    return Step(min(model.ready, wanted), wanted, is_over)


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
      warmroute restart demo --no-wait && watch warmroute status

    Ctrl-C stops waiting, not the restart. Exit status: 0 all are new and ready (with --no-wait: it has begun), 1 it
    cannot be done.
    """
    with Poller(lambda: locate(which, fleet_key)) as poller:
        before = poller.fleet.view()
        generation = poller.fleet.restart(model, int(surge)).generation
        if no_wait:
            click.echo(f"Replacing the replicas of {model} one by one; see `warmroute status`")
            return
        follow(poller, before, model, f"Restarting {model}", lambda view, now: renewed_so_far(view, now, generation))
    click.echo(f"All replicas of {model} are new")


def renewed_so_far(view: View, model: ModelView, generation: int) -> Step:
    """Count the replicas of this generation, or a later one, that are ready."""
    mine = view.of(model.name)
    renewed = sum(replica.generation >= generation and replica.life in ("ready", "draining") for replica in mine)
    old = any(replica.generation < generation for replica in mine)
    return Step(min(renewed, model.wanted), model.wanted, not old and renewed >= model.wanted)
