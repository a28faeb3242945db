"""Brings a fleet to its desired state: one task follows each host, one loop acts on the reconciler's decisions."""

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from api.process.tasks import check, end
from fleet.control.autoscale import Autoscaler
from fleet.control.hosts import Host, HostGone, HostLost, Hosts
from fleet.control.reconcile import Begin, Kept, Reconciler
from fleet.host.report import beat
from fleet.plan import FleetPlan, ModelPlan, Task

LONGEST_WAIT_S = 60.0

_encode = msgspec.json.Encoder().encode


class Registry:
    """The members as routers ask for them, by long polling (docs/discovery.md, "The registry").

    Unknown until the first `publish`; a version that an earlier process gave out is none of ours.
    """

    def __init__(self) -> None:
        self.version = time.time_ns() // 1_000_000  # above all that a process before this one has given out
        self._members: list[dict[str, Any]] | None = None
        self._answer = b""
        self._changed = asyncio.Event()

    @property
    def known(self) -> bool:
        return self._members is not None

    def publish(self, members: Sequence[dict[str, Any]]) -> None:
        if self._members == members:
            return
        self.version += 1
        self._members = list(members)
        self._answer = _encode({"version": self.version, "members": self._members})
        self._changed.set()
        self._changed = asyncio.Event()

    def close(self) -> None:
        """Release all waiting requests."""
        self._changed.set()

    async def answer(self, after: int | None, wait_s: float) -> bytes | None:
        """The members, when they are others than at `after`, or after this wait. None: they are not known."""
        if after == self.version or not self.known:
            changed = self._changed
            try:
                async with asyncio.timeout(min(max(wait_s, 0.0), LONGEST_WAIT_S)):
                    await changed.wait()
            except TimeoutError:
                pass
        return self._answer if self.known else None


log = logging.getLogger(__name__)

LOOK_S = 0.5  # the pause between looks at what only time changes
AGAIN_S = 0.5  # before a host that is lost is asked again
BEGIN_AGAIN_S = 1.0  # before a host that could not be begun is tried again
PLACING_S = 10.0  # a host that has not reported for this long may wait for a node; before, it only starts
HEARD_WITHIN_S = 10.0  # after a restart: then those of whom nothing was heard are no members
STOPS_S = 30.0  # a host has this long to end after its replica's time to drain

_decode = msgspec.json.Decoder(Kept).decode


class StateStore:
    """Keeps the wanted state. This one keeps nothing, for a fleet that ends with its controller."""

    async def load(self) -> bytes | None:
        return None

    async def save(self, state: bytes) -> None: ...

    async def clear(self) -> None: ...


class Controller:
    """A fleet's controller: `run` it; the other methods change the desired state at any time."""

    def __init__(self, hosts: Hosts, store: StateStore) -> None:
        self.reconciler = Reconciler()
        self.registry = Registry()
        self.ended = asyncio.Event()  # everything has left
        self.waits: dict[str, str] = {}  # replica -> why it has not been placed
        self.replaced = 0
        self._hosts = hosts
        self._store = store
        self.host_of: dict[str, Host] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.scalers: dict[str, Autoscaler] = {}
        self._wake = asyncio.Event()
        self._saved = b""
        self._began_s = time.monotonic()

    # ---- the goal

    def want(self, plan: FleetPlan) -> None:
        self.reconciler.want(plan)
        self.look()

    def look(self) -> None:
        """Wake the loop to decide again."""
        self._wake.set()

    # ---- the loop

    async def restore(self) -> bool:
        """Take over the hosts of an earlier controller; True if it left a desired state."""
        saved = await self._store.load()
        if saved is None:
            return False
        self._saved = saved
        self.reconciler = Reconciler(_decode(saved))
        for replica in self.reconciler.replicas.values():
            self._begin(replica.task)
        for name in await self._hosts.there():
            if name not in self.reconciler.replicas:
                log.warning("%s: not in the plan; stopping it", name)
                stray = self._hosts.begin(Task(name=name, plan=ModelPlan(name=name, model=name)))
                self._tasks[name] = asyncio.create_task(self._stop(name, stray, 0.0))
        return True

    async def run(self) -> None:
        """Until everything has left after `reconciler.end()`."""
        try:
            while not self.ended.is_set():
                self._wake.clear()
                self._autoscale()
                for action in self.reconciler.decide():
                    if isinstance(action, Begin):
                        log.info("%s: begun", action.task.name)
                        self._begin(action.task)
                    else:
                        log.info("%s: drained, and stopped", action.name)
                        leaving = self._leave(action.name, action.limit_s, self._tasks.get(action.name))
                        self._tasks[action.name] = asyncio.create_task(leaving)
                state = _encode(self.reconciler.kept())
                if state != self._saved:
                    await self._store.save(state)
                    self._saved = state
                # Publish the members once they are complete: a shorter list would take replicas from every router.
                if self.registry.known or self.reconciler.settled or time.monotonic() - self._began_s > HEARD_WITHIN_S:
                    self.registry.publish(self.reconciler.members())
                check(self._tasks.values())  # a bug in a host's task ends the controller
                if self.reconciler.ending and not self.reconciler.replicas:
                    await self._store.clear()
                    self.ended.set()
                    return
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._wake.wait()
        finally:
            await end(self._tasks.values())

    def _begin(self, task: Task) -> None:
        """Begin a host; a failure concerns this replica alone, and is retried."""
        try:
            self.host_of[task.name] = self._hosts.begin(task)
        except (OSError, ValueError) as error:
            self.host_of.pop(task.name, None)
            self._say_lost(task.name, f"it cannot be begun: {error}")
            self._tasks[task.name] = asyncio.create_task(self._begin_later(task.name))
        else:
            self._tasks[task.name] = asyncio.create_task(self._follow(task))

    async def _begin_later(self, name: str) -> None:
        await asyncio.sleep(BEGIN_AGAIN_S)
        replica = self.reconciler.replicas[name]
        if not replica.leaving:
            self._begin(replica.task)

    # ---- one host

    async def _follow(self, task: Task) -> None:
        """Handle a host's reports until it stops."""
        name, host, after = task.name, self.host_of[task.name], None
        waiting = asyncio.create_task(self._why_not_placed(task))
        try:
            while True:
                try:
                    report = await host.report(after)
                except HostLost as error:
                    self._say_lost(name, str(error))
                    await asyncio.sleep(AGAIN_S)
                    continue
                waiting.cancel()
                self.waits.pop(name, None)
                after = (report.host, report.version)
                before = self.reconciler.replicas[name].report
                self.reconciler.reported(name, report)
                if before is None or beat(before) != beat(report):
                    log.info("%s: %s %s", name, report.life, report.why)
                    self.look()
        except HostGone as error:
            replica = self.reconciler.replicas[name]
            if not replica.leaving:
                log.warning("%s: %s; starting it again", name, error)
                await asyncio.sleep(AGAIN_S)
            if replica.leaving:  # perhaps since a moment ago: `_leave` says when it is gone
                return
            self.replaced += 1
            self.reconciler.gone(name)
            self.look()
        finally:
            waiting.cancel()
            self.waits.pop(name, None)

    def _say_lost(self, name: str, why: str) -> None:
        if self.reconciler.replicas[name].lost != why:
            log.warning("%s: %s", name, why)
        self.reconciler.lost(name, why)
        self.look()

    async def _why_not_placed(self, task: Task) -> None:
        while True:
            await asyncio.sleep(PLACING_S)
            why = await self._hosts.missing(task)
            if why is not None and self.waits.get(task.name) != why:
                log.warning("%s: waits for a place: %s", task.name, why)
                self.waits[task.name] = why

    async def _leave(self, name: str, limit_s: float, following: "asyncio.Task[None] | None") -> None:
        """Stop the replica and follow it until it is gone: routers hear of its drain and of its end."""
        host = self.host_of.get(name)
        if host is not None:  # else it never could be begun
            await self._stop(name, host, limit_s)
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        if self._tasks.get(name) is not asyncio.current_task():
            return  # the name is another one's by now
        self.reconciler.gone(name)
        self.host_of.pop(name, None)
        del self._tasks[name]
        self.look()

    async def _stop(self, name: str, host: Host, limit_s: float) -> None:
        """Stop a host, and retry while it cannot be reached: it may come back with its replica."""
        while True:
            try:
                async with asyncio.timeout(limit_s + STOPS_S):
                    await host.stop(limit_s)
                return
            except HostGone:
                return
            except (HostLost, TimeoutError) as error:
                log.warning("%s: cannot be stopped yet: %s", name, error or "no answer")
                await asyncio.sleep(AGAIN_S)

    # ---- how many

    def _autoscale(self) -> None:
        if self.reconciler.ending:
            return
        for model in self.reconciler.plan.models:
            if model.autoscale is None:
                self.scalers.pop(model.name, None)
                continue
            scaler = self.scalers.get(model.name)
            if scaler is None or scaler.plan != model.autoscale:
                scaler = self.scalers[model.name] = Autoscaler(model.autoscale)
            reports = [
                replica.report
                for replica in self.reconciler.replicas.values()
                if replica.task.plan.name == model.name and replica.ready and replica.report is not None
                if not (replica.leaving or replica.draining)
            ]
            wanted = self.reconciler.count(model.name)
            now_wanted = scaler.look(wanted, reports, time.monotonic())
            if now_wanted != wanted:
                log.info("%s: %d replicas instead of %d: %s", model.name, now_wanted, wanted, scaler.why)
                self.reconciler.scale(model.name, now_wanted)
