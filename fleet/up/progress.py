"""What `warmroute up` shows while a fleet starts: on a terminal what is awaited, elsewhere only what has happened."""

import sys
from contextlib import ExitStack

from rich.console import Console
from rich.progress import Progress as Bars
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from fleet.commands.view import View
from fleet.control.reconcile import first_count
from fleet.plan import FleetPlan
from fleet.voice import say


class Progress:
    def __init__(self, plan: FleetPlan, after: ExitStack) -> None:
        self._bars: Bars | None = None
        if sys.stdout.isatty():
            columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            self._bars = Bars(*columns, console=Console(), transient=True)
            wanted = sum(first_count(model) for model in plan.models)
            self._row = self._bars.add_task(f"0 of {wanted} replicas are ready", total=None)
            self._bars.start()
            after.callback(self.close)

    def show(self, view: View) -> None:
        """How far the fleet is."""
        if self._bars is not None:
            ready, wanted = (sum(getattr(model, key) for model in view.models) for key in ("ready", "wanted"))
            self._bars.update(self._row, description=f"{ready} of {wanted} replicas are ready")

    def say(self, text: str) -> None:
        if self._bars is None:
            say(text)
        else:
            self._bars.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """From here on there are only lines."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
