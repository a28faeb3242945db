"""`warmroute up --follow` at work: the fleet of a cluster is kept as its file says, while this process lives."""

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass

import click

from api.process.tasks import check, first
from fleet.commands.client import FleetClient
from fleet.plan import FleetPlan
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
    wrong: str = ""  # trouble with the file, which is said once

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
        why = ""  # said once
        while True:
            await self._look_at_file()
            try:
                started = await self.launcher.start(self.plan)
            except CannotStart as error:
                if str(error) != why:
                    why = str(error)
                    self.say(f"{why}; trying again")
                await asyncio.sleep(AGAIN_S)
                continue
            why, self.is_new, self.joined_once = "", False, True
            found = "was there, and has the plan" if started.found else "begins"
            self.say(f"The fleet {found}; routers find it with --registry {started.controller}")
            with FleetClient(started.controller, self.key) as fleet:
                watcher = Watcher(fleet, self.say)
                work = (watcher.follow(), watcher.away_for(AWAY_S), self._hand_over(fleet))
                check(await first(*map(asyncio.create_task, work)))

    async def _hand_over(self, fleet: FleetClient) -> None:
        """Send each new plan until it is accepted or refused."""
        while True:
            await self._look_at_file()
            try:
                if self.is_new:
                    await asyncio.to_thread(fleet.want, self.plan)
                    self.say(f"{self.file.path} has changed, and the fleet has the new plan")
                    self.is_new = False
            except Refused as error:
                if error.status < 500:
                    self.say(f"The fleet stays as it was: {error.format_message()}")
                    self.is_new = False
            except click.ClickException:  # the watcher says that nobody answers
                pass
            await asyncio.sleep(LOOK_S)

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
