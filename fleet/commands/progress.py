"""Follows a change of a model until it is done."""

import time
from collections.abc import Callable
from typing import NamedTuple

import click

from fleet.commands.client import CONTROLLER, Poller
from fleet.commands.view import View
from fleet.commands.words import changes
from fleet.display import Display
from router.console.asking import Unreachable

LOOK_S = 0.25
MISSING_S = 60.0  # a controller that was restarted has answered by then


class Step(NamedTuple):
    done: int
    of: int
    is_over: bool


def follow(poller: Poller, before: View, model: str, title: str, step: Callable[[View], Step]) -> None:
    """Show a model's progress until `step` reports the end; Ctrl-C stops waiting, not the change."""
    try:
        with Display(title) as display:
            _follow(poller, before, model, display, step)
    except KeyboardInterrupt:
        click.echo("Stopped waiting; the change stays in effect. See `warmroute status`.", err=True)
        raise


def _follow(poller: Poller, seen: View, model: str, display: Display, step: Callable[[View], Step]) -> None:
    while True:
        view = poller.look()
        if view is None:
            if poller.away_s > MISSING_S:
                raise Unreachable(CONTROLLER, poller.fleet.url, poller.why)
            if poller.is_news:
                display.line(f"The controller does not answer ({poller.why}); retrying")
        else:
            for line in changes(seen, view, model):
                display.line(line)
            if view.ending:
                raise click.ClickException("the fleet is ending")
            done, of, is_over = step(view)
            display.step(done, of)
            if is_over:
                return
            seen = view
        time.sleep(LOOK_S)
