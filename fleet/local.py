"""Replicas as child processes of this one, behind one front; a replica that dies is started again."""

import asyncio
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fleet.child import Child, Died, Log, Ready
from router.config import RouterConfig
from router.front import Front
from router.spec import ReplicaSpec
from router.status import not_ready

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
SETTLED_S = 60.0  # who ran for this long is started again at once
STOP_LIMIT_S = 20.0  # for a replica whose requests are done; then it is killed
PORT_TRIES = 16
LOOK_INTERVAL_S = 0.05


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
        router: RouterConfig,
    ) -> None:
        self.plans = plans
        self.ready: dict[str, Ready] = {}  # of those that were ready at least once
        self.failed = False
        self._take_ports = take_ports
        self._say = say
        self._router = router
        self._listener = listener
        self._front: Front
        self._children: dict[str, Child] = {}
        self._notes: set[str] = set()
        self._all_ready = asyncio.Event()
        self._ending = asyncio.Event()
        self._at_once = asyncio.Event()

    async def run(self, announce: Callable[[dict[str, Ready]], None]) -> None:
        """Serve until a signal; `announce` is called when all replicas are ready. CannotStart: one was never."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self.stop)
        self._front = Front(self._router, self._listener)
        await self._front.start()
        serving = asyncio.create_task(self._front.failed())
        keepers = [asyncio.create_task(self._keep(plan)) for plan in self.plans]
        try:
            await self._until(self._all_ready, [serving, *keepers])
            if not self._ending.is_set():
                announce(self.ready)
            await self._until(self._ending, [serving, *keepers])
            self._front.check()
        finally:
            self._ending.set()
            serving.cancel()
            await self._end(keepers)

    def stop(self) -> None:
        """The first request drains; a second one comes from someone who does not want to wait."""
        if not self._ending.is_set():
            self._ending.set()  # before anything is said: that may fail
            self._say("Ending when running requests are done; Ctrl-C again ends at once.")
            return
        self._at_once.set()
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
        self._front.upkeep.hold(ReplicaSpec(name=plan.name, url=ready.url, engine="warmroute"))
        self._say_once(child.notes())
        self._say(f"{plan.name} is ready after {time.monotonic() - begun_s:.1f} s")
        watching = asyncio.create_task(self._watch_front())
        try:
            return await child.ended()
        finally:
            watching.cancel()
            self._front.upkeep.release(plan.name)

    async def _watch_front(self) -> None:
        """All are ready when the router takes requests for each of them."""
        while len(self.ready) < len(self.plans) or not_ready(self._front.router, all_of_them=True):
            await asyncio.sleep(LOOK_INTERVAL_S)
        self._all_ready.set()

    def _say_once(self, notes: Sequence[str]) -> None:
        """What all replicas have to say about their settings is the same."""
        for note in notes:
            if note not in self._notes:
                self._notes.add(note)
                self._say(note)

    async def _end(self, keepers: Sequence[asyncio.Task[None]]) -> None:
        """Drain the front, then the replicas: so nobody refuses what the front has taken."""
        drain_timeout_s = self._router.drain_timeout_s
        limit_s = time.monotonic() + drain_timeout_s
        draining = asyncio.create_task(self._front.drain(drain_timeout_s))
        at_once = asyncio.create_task(self._at_once.wait())
        await asyncio.wait([draining, at_once], return_when=asyncio.FIRST_COMPLETED)
        cut = self._front.router.open_requests
        for task in (draining, at_once):
            task.cancel()
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        await self._front.close()
        if cut and not self._at_once.is_set():
            limit = f"{drain_timeout_s:g} s; --drain-timeout sets this limit"
            self._say(f"Running requests that were cut after {limit}: {cut}")
        # Whoever asks a replica itself, past the front, has what is left of the time.
        stop_s = STOP_LIMIT_S + max(0.0, limit_s - time.monotonic())
        stopped = await asyncio.gather(*(child.stop(stop_s) for child in self._children.values()))
        self.failed |= not all(stopped)
