"""Runs `warmroute up`: a controller, a router, and a watcher of the replicas."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec

from api.process.tasks import end, first
from fleet.commands.client import FleetClient
from fleet.control.record import View
from fleet.on_ray.orders import Launched
from fleet.plan import FleetPlan
from fleet.up.launching import Launcher
from fleet.up.planning import drain_timeout_s
from fleet.up.telling import Telling
from fleet.up.watching import CannotStart, Watcher
from router.config import RouterConfig
from router.console.asking import Refused, Unreachable
from router.process.front import Front

LOOK_INTERVAL_S = 0.05
ENDS_S = 60.0  # replicas have this long to end after their time to drain

T = TypeVar("T")


SETTLED_S = 60.0  # a fleet that lasted for this long has not failed at once
LONGEST_PAUSE_S = 30.0


def pause_s(tries: int) -> float:
    """Seconds before another try, after so many in a row: the second is at once."""
    return min(0.5 * 2.0 ** min(tries - 1, 10), LONGEST_PAUSE_S) if tries else 0.0


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


class FleetRun:
    """`run` it until a signal; `failed` is whether anything happened that a log may explain."""

    def __init__(self, plan: FleetPlan, launcher: Launcher, router: RouterConfig, told: Telling) -> None:
        """`router` lacks its registry."""
        self.failed = False
        self._plan = plan
        self._launcher = launcher
        self._router = router
        self._told = told
        self._ending = asyncio.Event()
        self._at_once = asyncio.Event()
        self._started: Launched | None = None
        self._front: Front | None = None

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
            self._told.say("Ending when running requests are done; Ctrl-C again ends at once.")

    def end_at_once(self) -> None:
        self._ending.set()
        self._at_once.set()
        self._launcher.kill()

    # ---- from start to announcement, and on

    async def _serve(self) -> None:
        began_s = time.monotonic()
        started = self._started = await self._unless_ended(self._launcher.start(self._plan))
        self._told.launched(started, time.monotonic() - began_s)
        with FleetClient(started.controller, self._told.key) as fleet:
            watcher = Watcher(fleet, self._told.say, self._told.show)
            failing = asyncio.create_task(self._launcher.failed())
            try:
                view = await self._unless_ended(self._all_ready(watcher), failing)
                self._told.announce(view)
            finally:
                await end([failing])
                self.failed |= watcher.failed
            if self._told.listener is not None:
                try:
                    await self._unless_ended(self._follow(watcher))
                finally:
                    self.failed |= watcher.failed

    async def _all_ready(self, watcher: Watcher) -> View:
        """Replicas and the router start side by side; all are ready when the router takes requests for each."""
        assert self._started is not None
        if self._told.listener is not None:
            config = msgspec.structs.replace(self._router, registry=self._started.controller)
            self._front = Front(config, self._told.listener)
            await self._front.start()
        while True:
            view = await watcher.complete()
            if self._front is None:
                return view
            router, wanted = self._front.router, sum(model.wanted for model in view.models)
            known = len(router.members.by_name) >= wanted
            if known and (not wanted or router.lifecycle.not_ready(all_of_them=True) is None):
                return view
            self._front.check()
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def _follow(self, watcher: Watcher) -> None:
        assert self._front is not None
        following = asyncio.create_task(watcher.follow())
        keeping = asyncio.create_task(self._keep(watcher))
        done = await first(following, keeping, beside=self._front.tasks)
        self._front.check()
        for task in done:
            task.result()

    async def _keep(self, watcher: Watcher) -> None:
        """Begin the fleet again whenever it is lost, while the router lets requests wait. CannotStart: too often."""
        launcher, tries, began_s = self._launcher, 0, time.monotonic()
        while True:
            failed = asyncio.create_task(launcher.failed())
            away = asyncio.create_task(watcher.away_for(launcher.away_s))
            done = await first(failed, away)
            why = failed.result() if failed in done else f"no controller answers for {launcher.away_s:g} s"
            self.failed = True
            if watcher.view is not None and watcher.view.ending:
                raise CannotStart(why)
            watcher.lost()
            if time.monotonic() - began_s > SETTLED_S:
                tries = 0
            tries = await self._begin_again(why, tries, plan_now(self._plan, watcher.view))
            began_s = time.monotonic()
            watcher.begun_again()

    async def _begin_again(self, why: str, tries: int, plan: FleetPlan) -> int:
        """Return how many tries there have been in a row, some of them before."""
        assert self._started is not None
        began_s, said = time.monotonic(), ""
        while tries < self._launcher.retries:
            if why != said:
                self._told.say(f"The fleet is lost: {why}\nStarting it again; requests wait meanwhile.")
                said = why
            await asyncio.sleep(pause_s(tries))
            tries += 1
            try:
                started = await self._launcher.start(plan, again=True)
            except CannotStart as error:
                why = str(error)
                continue
            if started.controller != self._started.controller:
                raise CannotStart(
                    f"The fleet runs again, with its controller at {started.controller}, "
                    f"and not at {self._started.controller}, where routers ask; start `warmroute up` anew"
                )
            self._told.launched(started, time.monotonic() - began_s)
            return tries
        raise CannotStart(f"{why}\nThe fleet was restarted {self._launcher.retries:g} times, and was lost each time")

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
        began_s = asyncio.get_running_loop().time()
        limit_s = drain_timeout_s(self._plan)
        if self._front is not None:
            cut = await self._unless_at_once(self._front.drain(limit_s))
            await self._front.close()
            if cut:
                limit = f"{limit_s:g} s; the replicas' --drain-timeout sets this limit"
                self._told.say(f"Running requests that were cut after {limit}: {cut}")
        if not self._launcher.holds:
            await self._launcher.close()  # it may be about to begin the fleet again
        # Those found running go on, and those left without a router here.
        stay = self._started is None or self._started.found or (self._told.listener is None and self._told.announced)
        if not stay:
            # Clients that ask a replica itself, past the front, have the rest of the time.
            left_s = max(0.0, limit_s - (asyncio.get_running_loop().time() - began_s))
            await self._unless_at_once(self._end_replicas(left_s + ENDS_S))
        await self._launcher.close()
        self.failed |= not self._launcher.clean

    async def _end_replicas(self, limit_s: float) -> None:
        assert self._started is not None
        with FleetClient(self._started.controller, self._told.key) as fleet, contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                try:
                    await asyncio.to_thread(fleet.end)
                    await Watcher(fleet, self._told.say).ended()
                except Unreachable:  # there is no controller any more, and so no replica
                    pass
                except Refused as error:
                    self.failed = True
                    self._told.say(f"The replicas go on: {error.format_message()}")

    async def _unless_at_once(self, wanted: Coroutine[Any, Any, T]) -> T | None:
        working = asyncio.create_task(wanted)
        at_once = asyncio.create_task(self._at_once.wait())
        return working.result() if working in await first(working, at_once) else None
