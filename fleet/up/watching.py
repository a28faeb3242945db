"""Follows a fleet through its controller's eyes, and says what happens to its replicas."""

import asyncio
import time
from collections.abc import Callable

import click

from fleet.commands.client import FleetClient
from fleet.commands.words import changes
from fleet.control.record import View

STARTING_LOOK_S = 0.1
LOOK_S = 1.0
NOTHING = View(models=(), replicas=())


class CannotStart(Exception):
    """Raised when a replica ends before it is ready for the first time, or nothing can be started."""


class Watcher:
    """`view` is what was seen last; `failed`, whether anything happened that a log may explain."""

    def __init__(
        self, fleet: FleetClient, say: Callable[[str], None], show: Callable[[View], None] = lambda _: None
    ) -> None:
        self.view: View | None = None
        self.failed = False
        self._away_since_s: float | None = None
        self._fleet = fleet
        self._say = say
        self._show = show
        self._before = NOTHING
        self._notes: set[str] = set()

    async def complete(self) -> View:
        """Wait until all that is wanted is ready. CannotStart: one ended before."""
        ready: set[str] = set()
        while True:
            view = await asyncio.to_thread(self._fleet.view)
            ready.update(each.name for each in view.replicas if each.life == "ready")
            for replica in view.replicas:
                if replica.why and replica.life in ("failing", "starting") and replica.name not in ready:
                    words = "".join(f"\n  | {line}" for line in replica.last_words)
                    raise CannotStart(f"{replica.name} {replica.why} before it was ready; its last words:{words}")
            self._tell(view)
            if view.models and view.complete:
                return view
            await asyncio.sleep(STARTING_LOOK_S)

    async def follow(self) -> None:
        """Watch while the fleet runs; say once that the controller does not answer."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except click.ClickException as error:
                if self._away_since_s is None:
                    self._away_since_s = time.monotonic()
                    self._say(f"The controller is away: {error.format_message()}")
                continue
            if self._away_since_s is not None:
                self._say("The controller is back")
            self._away_since_s = None

    async def away_for(self, seconds: float) -> None:
        """Wait until the controller has not answered for so many seconds."""
        while self._away_since_s is None or time.monotonic() - self._away_since_s < seconds:
            await asyncio.sleep(LOOK_S)

    def lost(self) -> None:
        """Forget the replicas: the fleet begins again, and so do they."""
        self._before = NOTHING

    def begun_again(self) -> None:
        """Count anew how long the controller has been away."""
        if self._away_since_s is not None:
            self._away_since_s = time.monotonic()

    async def ended(self) -> None:
        """Wait until nothing runs any more, which is when the controller is gone or has nothing left."""
        while True:
            try:
                view = self.view = await asyncio.to_thread(self._fleet.view)
            except click.ClickException:
                return
            if view.ending and not view.replicas:
                return
            await asyncio.sleep(STARTING_LOOK_S)

    async def look(self) -> None:
        self._tell(await asyncio.to_thread(self._fleet.view))

    def _tell(self, view: View) -> None:
        before = {each.name: each for each in self._before.replicas}
        for line in changes(self._before, view, starts=False):
            self._say(line)
        for replica in view.replicas:
            failing = replica.why and replica.life in ("failing", "starting")
            self.failed |= bool(failing) or replica.died_since(before.get(replica.name))
            for note in replica.notes if replica.life == "ready" else ():
                if note not in self._notes:  # all replicas have the same: each is said once
                    self._notes.add(note)
                    self._say(note)
        self.view = self._before = view
        self._show(view)
