"""Follows a fleet through its controller's eyes, and says what happens to its replicas."""

import asyncio
import time
from collections.abc import Callable
from operator import attrgetter

import click

from fleet.commands.client import FleetClient
from fleet.commands.view import ReplicaView, View
from fleet.commands.words import happened

STARTING_LOOK_S = 0.1
LOOK_S = 1.0
STATE = attrgetter("life", "starts", "why")


class CannotStart(Exception):
    """Raised when a replica ends before it is ready for the first time, or nothing can be started."""


class Watcher:
    """`view` is what was seen last; `failed`, whether anything happened that a log may explain."""

    def __init__(
        self, fleet: FleetClient, say: Callable[[str], None], show: Callable[[View], None] | None = None
    ) -> None:
        self.view: View | None = None
        self.failed = False
        self._away_since_s: float | None = None
        self._fleet = fleet
        self._say = say
        self._show = show
        self._seen: dict[str, ReplicaView] = {}
        self._began_s: dict[str, float] = {}
        self._ready: set[str] = set()  # those that were ready at least once
        self._notes: set[str] = set()

    async def complete(self) -> View:
        """Wait until all that is wanted is ready. CannotStart: one ended before."""
        while True:
            view = await self.look()
            for replica in view.replicas:
                if replica.why and replica.life in ("failing", "starting") and replica.name not in self._ready:
                    raise CannotStart(
                        f"{replica.name} {replica.why} before it was ready; its last words:{_last_words(replica)}"
                    )
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
        self._seen.clear()

    def begun_again(self) -> None:
        """Count anew how long the controller has been away."""
        if self._away_since_s is not None:
            self._away_since_s = time.monotonic()

    async def ended(self) -> None:
        """Wait until nothing runs any more, which is when the controller is gone or has nothing left."""
        while True:
            try:
                view = await asyncio.to_thread(self._fleet.view)
            except click.ClickException:
                return
            self.view = view
            if view.ending and not view.replicas:
                return
            await asyncio.sleep(STARTING_LOOK_S)

    async def look(self) -> View:
        view = self.view = await asyncio.to_thread(self._fleet.view)
        for replica in view.replicas:
            before = self._seen.get(replica.name)
            if before is None or STATE(before) != STATE(replica):
                self._changed(replica, before)
            self._seen[replica.name] = replica
        if self._show is not None:
            self._show(view)
        for name in set(self._seen) - {replica.name for replica in view.replicas}:
            del self._seen[name]
            self._say(f"{name} is gone")
        return view

    def _changed(self, replica: ReplicaView, before: ReplicaView | None) -> None:
        name = replica.name
        if why := self._died(replica, before):
            self.failed = True
            self._say(f"{name} {why}; it is started again. Its last words:{_last_words(replica)}")
        if replica.life in ("placing", "starting"):
            self._began_s.setdefault(name, time.monotonic())
        if replica.life == "lost" or (replica.why and replica.life == "placing"):
            self._say(f"{name} {happened(replica)}")
        elif replica.life == "ready":
            for note in dict.fromkeys(replica.notes):  # all replicas have the same: each is said once
                if note not in self._notes:
                    self._say(note)
            self._notes.update(replica.notes)
            took_s = time.monotonic() - self._began_s.pop(name, time.monotonic())
            self._say(f"{name} is ready after {took_s:.1f} s" if took_s >= STARTING_LOOK_S else f"{name} is ready")
            self._ready.add(name)
        elif replica.life in ("leaving", "draining"):
            self._say(f"{name} drains")

    def _died(self, replica: ReplicaView, before: ReplicaView | None) -> str:
        """Say how a replica that was ready has ended since the last look, if it did."""
        if replica.name not in self._ready:
            return ""
        if replica.why:
            is_new = before is None or replica.why != before.why
            return replica.why if is_new and replica.life in ("failing", "starting") else ""
        return "has ended" if replica.died_since(before) else ""


def _last_words(replica: ReplicaView) -> str:
    return "".join(f"\n  | {line}" for line in replica.last_words)
