"""Runs `warmroute up`: a controller, a router, and a watcher of the replicas."""

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

import msgspec

from fleet.commands.client import FleetClient
from fleet.commands.view import View
from fleet.on_ray.orders import Launched
from fleet.plan import FleetPlan
from fleet.tasks import first
from fleet.up.launching import Launcher
from fleet.up.planning import drain_timeout_s
from fleet.up.watching import CannotStart, Watcher
from router.config import RouterConfig
from router.console.asking import Refused, Unreachable
from router.process.front import Front

LOOK_INTERVAL_S = 0.05
ENDS_S = 60.0  # replicas have so long to end after their time to drain

T = TypeVar("T")


FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
SETTLED_S = 60.0  # a fleet that lasted for so long has not failed at once


class Retries:
    """Limits retries in a row: the first at once, later ones after doubling pauses."""

    def __init__(self, most: float, now_s: Callable[[], float]) -> None:
        self._most = most
        self._now_s = now_s
        self._count = 0
        self._began_s = now_s()

    def began(self) -> None:
        self._began_s = self._now_s()

    def lost(self) -> None:
        """Note that the fleet is lost; one that had run for a while gets all retries again."""
        if self._now_s() - self._began_s > SETTLED_S:
            self._count = 0

    def next_pause_s(self) -> float | None:
        """Seconds to wait before the next try; None: there were enough."""
        if self._count >= self._most:
            return None
        self._count += 1
        if self._count == 1:
            return 0.0
        return min(FIRST_PAUSE_S * 2.0 ** min(self._count - 2, 64), LONGEST_PAUSE_S)


def plan_now(plan: FleetPlan, seen: View | None) -> FleetPlan:
    """The plan with as many replicas as were wanted when the fleet was seen last."""
    wanted = {model.name: model.wanted for model in seen.models} if seen is not None else {}
    return msgspec.structs.replace(
        plan,
        models=tuple(
            msgspec.structs.replace(model, replicas=wanted.get(model.name, model.replicas)) for model in plan.models
        ),
    )


class Interrupted(Exception):
    """Raised when a signal comes first."""


class Job(NamedTuple):
    """A fleet to run, and the callbacks that are told of it."""

    plan: FleetPlan
    launcher: Launcher
    key: str  # the controller's key
    listener: socket.socket | None  # the router's socket; None: none runs here
    router: RouterConfig  # but for its registry
    say: Callable[[str], None]
    show: Callable[[View], None]
    launched: Callable[[Launched, float], None]  # and how many seconds that took
    announce: Callable[[View], None]


class FleetRun:
    """`run` it until a signal; `failed` is whether anything happened that a log may explain."""

    def __init__(self, job: Job) -> None:
        self.failed = False
        self._job = job
        self._ending = asyncio.Event()
        self._at_once = asyncio.Event()
        self._started: Launched | None = None
        self._front: Front | None = None
        self._announced = False

    async def run(self) -> None:
        """CannotStart: a replica could not, or Ray."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.stop)
        loop.add_signal_handler(signal.SIGHUP, self.drain)  # a terminal that is closed, or `warmroute down`
        loop.add_signal_handler(signal.SIGUSR1, self.end_at_once)
        with contextlib.suppress(Interrupted):
            try:
                await self._serve()
            finally:
                self._ending.set()
                await self._end()

    def stop(self) -> None:
        """Drain; a second call ends at once."""
        if self._ending.is_set():
            self.end_at_once()
        else:
            self.drain()

    def drain(self) -> None:
        if not self._ending.is_set():
            self._ending.set()  # before anything is said: that may fail
            self._job.say("Ending when running requests are done; Ctrl-C again ends at once.")

    def end_at_once(self) -> None:
        self._ending.set()
        self._at_once.set()
        self._job.launcher.kill()

    # ---- from start to announcement, and on

    async def _serve(self) -> None:
        job, began_s = self._job, time.monotonic()
        started = self._started = await self._unless_ended(job.launcher.start(job.plan))
        job.launched(started, time.monotonic() - began_s)
        with FleetClient(started.controller, job.key) as fleet:
            watcher = Watcher(fleet, job.say, job.show)
            failing = asyncio.create_task(job.launcher.failed())
            try:
                view = await self._unless_ended(self._all_ready(watcher), failing)
                job.announce(view)
                self._announced = True
            finally:
                failing.cancel()
                await asyncio.gather(failing, return_exceptions=True)
                self.failed |= watcher.failed
            if job.listener is not None:
                try:
                    await self._unless_ended(self._follow(watcher))
                finally:
                    self.failed |= watcher.failed

    async def _all_ready(self, watcher: Watcher) -> View:
        """Replicas and the router start side by side; all are ready when the router takes requests for each."""
        assert self._started is not None
        if self._job.listener is not None:
            config = msgspec.structs.replace(self._job.router, registry=self._started.controller)
            self._front = Front(config, self._job.listener)
            await self._front.start()
        while True:
            view = await watcher.complete()
            if self._front is None or self._takes_all(self._front, view):
                return view
            self._front.check()
            await asyncio.sleep(LOOK_INTERVAL_S)

    @staticmethod
    def _takes_all(front: Front, view: View) -> bool:
        wanted = sum(model.wanted for model in view.models)
        known = len(front.router.members.by_name)
        return known >= wanted and (not wanted or front.router.lifecycle.not_ready(all_of_them=True) is None)

    async def _follow(self, watcher: Watcher) -> None:
        assert self._front is not None
        serving = asyncio.create_task(self._front.failed())
        following = asyncio.create_task(watcher.follow())
        keeping = asyncio.create_task(self._keep(watcher))
        done = await first(serving, following, keeping)
        self._front.check()
        for task in done:
            task.result()

    async def _keep(self, watcher: Watcher) -> None:
        """Begin the fleet again whenever it is lost, while the router lets requests wait. CannotStart: too often."""
        retries = Retries(self._job.launcher.retries, time.monotonic)
        while True:
            launcher = self._job.launcher
            failed = asyncio.create_task(launcher.failed())
            away = asyncio.create_task(watcher.away_for(launcher.away_s))
            done = await first(failed, away)
            why = failed.result() if failed in done else f"no controller answers for {launcher.away_s:g} s"
            self.failed = True
            retries.lost()
            if watcher.view is not None and watcher.view.ending:
                raise CannotStart(why)
            watcher.lost()
            await self._begin_again(why, retries, plan_now(self._job.plan, watcher.view))
            watcher.begun_again()

    async def _begin_again(self, why: str, retries: Retries, plan: FleetPlan) -> None:
        assert self._started is not None
        job, began_s, said = self._job, time.monotonic(), ""
        while True:
            if (pause_s := retries.next_pause_s()) is None:
                raise CannotStart(
                    f"{why}\nThe fleet was restarted {job.launcher.retries:g} times, and was lost each time"
                )
            if why != said:
                job.say(f"The fleet is lost: {why}\nStarting it again; requests wait meanwhile.")
                said = why
            await asyncio.sleep(pause_s)
            try:
                started = await job.launcher.start(plan, again=True)
            except CannotStart as error:
                why = str(error)
                continue
            retries.began()
            if started.controller != self._started.controller:
                raise CannotStart(
                    f"The fleet runs again, with its controller at {started.controller}, "
                    f"and not at {self._started.controller}, where routers ask; start `warmroute up` anew"
                )
            job.launched(started, time.monotonic() - began_s)
            return

    async def _unless_ended(self, wanted: Coroutine[Any, Any, T], failing: "asyncio.Task[str] | None" = None) -> T:
        """Raise Interrupted if a signal comes first, CannotStart if the launcher cannot go on."""
        working = asyncio.create_task(wanted)
        ending = asyncio.create_task(self._ending.wait())
        done = await first(working, ending, beside=[failing] if failing else [])
        if working in done:
            return working.result()
        if failing is not None and failing in done:
            raise CannotStart(failing.result())
        raise Interrupted

    # ---- the end

    async def _end(self) -> None:
        """Drain the router, then the replicas, so that none refuses an accepted request."""
        job, began_s = self._job, asyncio.get_running_loop().time()
        limit_s = drain_timeout_s(job.plan)
        if self._front is not None:
            cut = await self._unless_at_once(self._front.drain(limit_s))
            await self._front.close()
            if cut:
                limit = f"{limit_s:g} s; the replicas' --drain-timeout sets this limit"
                job.say(f"Running requests that were cut after {limit}: {cut}")
        if not job.launcher.holds:
            await job.launcher.close()  # it may be about to begin the fleet again
        # Those found running go on, and those left without a router here.
        stay = self._started is None or self._started.found or (job.listener is None and self._announced)
        if not stay:
            # Whoever asks a replica itself, past the front, has what is left of the time.
            left_s = max(0.0, limit_s - (asyncio.get_running_loop().time() - began_s))
            await self._unless_at_once(self._end_replicas(left_s + ENDS_S))
        await job.launcher.close()
        self.failed |= not job.launcher.clean

    async def _end_replicas(self, limit_s: float) -> None:
        assert self._started is not None
        with FleetClient(self._started.controller, self._job.key) as fleet, contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                try:
                    await asyncio.to_thread(fleet.end)
                    await Watcher(fleet, self._job.say).ended()
                except Unreachable:  # there is no controller any more, and so no replica
                    pass
                except Refused as error:
                    self.failed = True
                    self._job.say(f"The replicas go on: {error.format_message()}")

    async def _unless_at_once(self, wanted: Coroutine[Any, Any, T]) -> T | None:
        working = asyncio.create_task(wanted)
        at_once = asyncio.create_task(self._at_once.wait())
        return working.result() if working in await first(working, at_once) else None
