"""Replicas as child processes of this one, behind one front; a replica that dies is started again."""

import asyncio
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fleet.child import Child, Died, Log, Ready
from router.front_server import FrontServer
from router.round_robin import Replica, RoundRobin

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
SETTLED_S = 60.0  # who ran for this long is started again at once
STOP_LIMIT_S = 20.0  # for a replica whose requests are done; then it is killed
PORT_TRIES = 16


class Plan(NamedTuple):
    """One replica: its name, how its command is made with the ports of its events, its log."""

    name: str
    command: Callable[[int], Sequence[str]]
    log: Log


class CannotStart(Exception):
    """A replica ended before it was ready for the first time."""


class LocalFleet:
    """`say` is told what happens; `failed` is whether anything did that a log may explain."""

    def __init__(
        self,
        plans: Sequence[Plan],
        take_ports: Callable[[], int],
        listener: socket.socket,
        say: Callable[[str], None],
        drain_timeout_s: float = 60.0,
    ) -> None:
        self.plans = plans
        self.ready: dict[str, Ready] = {}  # of those that were ready at least once
        self.failed = False
        self._take_ports = take_ports
        self._say = say
        self._front = RoundRobin()
        self._server = FrontServer(self._front, drain_timeout_s)
        self._drain_timeout_s = drain_timeout_s
        self._listener = listener
        self._children: dict[str, Child] = {}
        self._notes: set[str] = set()
        self._all_ready = asyncio.Event()
        self._ending = asyncio.Event()

    async def run(self, announce: Callable[[dict[str, Ready]], None]) -> None:
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
            self._ending.set()  # before anything is said: that may fail
            self._say("Ending when running requests are done; Ctrl-C again ends at once.")
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
        command, tries = plan.command(self._take_ports()), 1
        while not self._ending.is_set():
            begun_s = time.monotonic()
            ending = await self._run_once(plan, command)
            if self._ending.is_set():
                return
            child = self._children[plan.name]
            if plan.name not in self.ready and child.lost_its_ports() and tries < PORT_TRIES:
                command, tries = plan.command(self._take_ports()), tries + 1
                continue
            self.failed = True
            lines = "".join(f"\n  | {line}" for line in child.last_lines())
            if plan.name not in self.ready:
                raise CannotStart(f"{plan.name} {ending} before it was ready; its last words:{lines}")
            if time.monotonic() - begun_s > SETTLED_S:
                pause_s = FIRST_PAUSE_S
            self._say(f"{plan.name} {ending}; it is started again in {pause_s:g} s. Its last words:{lines}")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _run_once(self, plan: Plan, command: Sequence[str]) -> str:
        """One life of a replica; returns how it ended."""
        begun_s = time.monotonic()
        child = self._children[plan.name] = await Child.start(plan.name, command, plan.log)
        try:
            ready = await child.ready()
        except Died as death:
            return str(death)
        self.ready[plan.name] = ready
        target = Replica(plan.name, ready.host, ready.port)
        self._front.replicas.append(target)
        self._say_once(child.notes())
        self._say(f"{plan.name} is ready after {time.monotonic() - begun_s:.1f} s")
        if len(self.ready) == len(self.plans):
            self._all_ready.set()
        try:
            return await child.ended()
        finally:
            self._front.replicas.remove(target)

    def _say_once(self, notes: Sequence[str]) -> None:
        """What all replicas have to say about their settings is the same."""
        for note in notes:
            if note not in self._notes:
                self._notes.add(note)
                self._say(note)

    async def _end(self, serving: asyncio.Task[None], keepers: Sequence[asyncio.Task[None]]) -> None:
        """Drain the front, then the replicas: so nobody refuses what the front has taken."""
        limit_s = time.monotonic() + self._drain_timeout_s
        self._server.should_exit = True
        await serving
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        if self._front.cut:
            limit = f"{self._drain_timeout_s:g} s; --drain-timeout sets this limit"
            self._say(f"Running requests that were cut after {limit}: {self._front.cut}")
        # Whoever asks a replica itself, past the front, has what is left of the time.
        stop_s = STOP_LIMIT_S + max(0.0, limit_s - time.monotonic())
        stopped = await asyncio.gather(*(child.stop(stop_s) for child in self._children.values()))
        self.failed |= not all(stopped)
