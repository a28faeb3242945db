"""Replicas as child processes of this one, behind one front; a replica that dies is started again."""

import asyncio
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from fleet.child import Addresses, Child, Died
from router.round_robin import FrontServer, Replica, RoundRobin

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
SETTLED_S = 60.0  # who ran for this long is started again at once
DRAIN_LIMIT_S = 60
STOP_LIMIT_S = 20.0  # a replica whose requests are done; then it is killed


class Plan(NamedTuple):
    """One replica: its name, its command, its log."""

    name: str
    command: Sequence[str]
    log: Path


class CannotStart(Exception):
    """A replica ended before it was ready for the first time."""


class LocalFleet:
    """`say` is told what happens; `failed` is whether anything did that a log may explain."""

    def __init__(self, plans: Sequence[Plan], listener: socket.socket, say: Callable[[str], None]) -> None:
        self.plans = plans
        self.ready: dict[str, Addresses] = {}  # of those that were ready at least once
        self.failed = False
        self._say = say
        self._front = RoundRobin()
        self._server = FrontServer(self._front, DRAIN_LIMIT_S)
        self._listener = listener
        self._children: dict[str, Child] = {}
        self._all_ready = asyncio.Event()
        self._ending = asyncio.Event()

    async def run(self, announce: Callable[[dict[str, Addresses]], None]) -> None:
        """Serve until a signal; `announce` is called when all replicas are ready. CannotStart: one was never."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self.stop)
        serving = asyncio.create_task(self._server.serve([self._listener]))
        keepers = [asyncio.create_task(self._keep(plan)) for plan in self.plans]
        try:
            await self._until(self._all_ready, [serving, *keepers])
            if not self._ending.is_set():
                announce(self.ready)
            await self._until(self._ending, [serving, *keepers])
        finally:
            self._ending.set()
            await self._end(serving, keepers)

    def stop(self) -> None:
        """The first request drains; a second one comes from someone who does not want to wait."""
        if not self._ending.is_set():
            self._say("Ending when running requests are done; Ctrl-C again ends at once.")
            self._ending.set()
            return
        self._server.force_exit = True
        for child in self._children.values():
            child.signal(signal.SIGKILL)

    async def _until(self, event: asyncio.Event, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Wait for this event or for the end; what one of the tasks could not handle is raised."""
        waits = [asyncio.create_task(each.wait()) for each in (event, self._ending)]
        try:
            done, _ = await asyncio.wait({*waits, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        for task in done:
            task.result()

    async def _keep(self, plan: Plan) -> None:
        """Have this replica run, whatever happens to its processes."""
        pause_s = FIRST_PAUSE_S
        while not self._ending.is_set():
            begun_s = time.monotonic()
            ending = await self._run_once(plan)
            if self._ending.is_set():
                return
            self.failed = True
            if time.monotonic() - begun_s > SETTLED_S:
                pause_s = FIRST_PAUSE_S
            lines = "".join(f"\n  | {line}" for line in self._children[plan.name].last_lines())
            if plan.name not in self.ready:
                raise CannotStart(f"{plan.name} {ending} before it was ready; its last words:{lines}")
            self._say(f"{plan.name} {ending}; it is started again in {pause_s:g} s. Its last words:{lines}")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _run_once(self, plan: Plan) -> str:
        """One life of a replica; returns how it ended."""
        begun_s = time.monotonic()
        child = self._children[plan.name] = await Child.start(plan.name, plan.command, plan.log)
        try:
            addresses = await child.ready()
        except Died as death:
            return str(death)
        self.ready[plan.name] = addresses
        target = Replica(plan.name, addresses.host, addresses.port)
        self._front.replicas.append(target)
        self._say(f"{plan.name} is ready after {time.monotonic() - begun_s:.1f} s")
        if len(self.ready) == len(self.plans):
            self._all_ready.set()
        try:
            return await child.ended()
        finally:
            self._front.replicas.remove(target)

    async def _end(self, serving: asyncio.Task[None], keepers: Sequence[asyncio.Task[None]]) -> None:
        """Drain the front, then the replicas: so nobody refuses what the front has taken."""
        self._server.should_exit = True
        await serving
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        stopped = await asyncio.gather(*(child.stop(STOP_LIMIT_S) for child in self._children.values()))
        self.failed |= not all(stopped)
