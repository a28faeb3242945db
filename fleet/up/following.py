"""`warmroute up --follow` at work: the fleet of a cluster is kept as its file says, while this process lives."""

import asyncio
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import click

from fleet.commands.client import FleetClient
from fleet.plan import FleetPlan
from fleet.tasks import first
from fleet.up.launching import Launcher
from fleet.up.watching import CannotStart, Watcher
from router.console.asking import Refused
from router.members.watched_file import WatchedFile

LOOK_S = 1.0
AGAIN_S = 5.0  # after Ray could not be joined
AWAY_S = 10.0  # Ray restarts a controller within that time, mostly; it keeps its plan


@dataclass
class Following:
    """A followed fleet file: `run` it until a signal; the fleet outlives it."""

    plan: FleetPlan
    file: WatchedFile
    read: Callable[[], FleetPlan]  # the file; a click error says what is wrong with it
    launcher: Launcher
    key: str
    say: Callable[[str], None]
    joined_once: bool = False
    is_new: bool = True  # whether the controller has yet to be told of the plan
    wrong: str = ""  # trouble with the file, and with the last wish: each is said once
    failed: str = ""

    async def run(self) -> None:
        ending = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, ending.set)
        following = asyncio.create_task(self._follow())
        try:
            await first(following, asyncio.create_task(ending.wait()))
        finally:
            self.launcher.kill()  # it may be about to join a Ray that does not answer
            await self.launcher.close()
        if not ending.is_set():
            following.result()  # raises the mistake of ours that has ended it
        if self.joined_once:
            self.say("The fleet goes on.")

    async def _follow(self) -> None:
        while True:
            await self._look_at_file()
            try:
                started = await self.launcher.start(self.plan)
            except CannotStart as error:
                self._complain(f"{error}; trying again")
                await asyncio.sleep(AGAIN_S)
                continue
            self.failed, self.is_new, self.joined_once = "", False, True
            found = "was there, and has the plan" if started.found else "begins"
            self.say(f"The fleet {found}; routers find it with --registry {started.controller}")
            with FleetClient(started.controller, self.key) as fleet:
                await self._keep(fleet)

    async def _keep(self, fleet: FleetClient) -> None:
        """Follow the file until the controller is gone."""
        watcher, heard_s = Watcher(fleet, self.say), time.monotonic()
        while True:
            await self._look_at_file()
            try:
                await watcher.look()
                heard_s, self.failed = time.monotonic(), ""
                if self.is_new:
                    await self._hand_over(fleet)
            except click.ClickException as error:
                self._complain(error.format_message())
                if time.monotonic() - heard_s > AWAY_S:
                    return
            await asyncio.sleep(LOOK_S)

    async def _hand_over(self, fleet: FleetClient) -> None:
        """Retry until the plan is accepted or refused."""
        try:
            await asyncio.to_thread(fleet.want, self.plan)
        except Refused as error:
            if error.status >= 500:
                raise
            self.say(f"The fleet stays as it was: {error.format_message()}")
        else:
            self.say(f"{self.file.path} has changed, and the fleet has the new plan")
        self.is_new = False

    async def _look_at_file(self) -> None:
        try:
            if self.file.read_if_changed() is not None:
                plan = await asyncio.to_thread(self.read)
                self.is_new = self.is_new or plan != self.plan
                self.plan = plan
                self.wrong = ""
        except (ValueError, click.ClickException) as error:
            why = error.format_message() if isinstance(error, click.ClickException) else str(error)
            if why != self.wrong:
                self.say(f"The fleet stays as it was: {why}")
            self.wrong = why

    def _complain(self, why: str) -> None:
        if why != self.failed:
            self.say(why)
        self.failed = why
