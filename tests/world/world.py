"""A whole world from one seed: what is in it, what happens, and what must hold at its end."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any, cast

import msgspec

from router.config import RouterConfig
from router.process.front import Front
from router.records.access_log import Line
from tests.world.audit import Audit
from tests.world.client import StreamingClient
from tests.world.loop import WorldLoop, run
from tests.world.network import HERE, Bound, Host, Network
from tests.world.replica import ScriptedReplica

PORT = 8000
LASTS_S = 60.0  # with clients and faults
CALM_S = 10.0  # after the last fault: then the router knows everything again
SPOKEN = ("router", "events", "api", "asyncio")


class World:
    """`faults=False` leaves the same world undisturbed; `settings` are the router's, beside those that are drawn."""

    def __init__(self, seed: int, *, faults: bool = True, **settings: Any) -> None:
        self.seed = seed
        self.timeline: list[str] = []
        self.audit = Audit()
        self._faults, self._settings = faults, settings
        self._chance = random.Random(f"{seed} script")
        self.loop = WorldLoop(random.Random(f"{seed} loop"))
        self.network = Network(self.loop, str(seed))
        self.loop.set_exception_handler(self._failed)

    def run(self) -> "World":
        with self._logged():
            run(self._live(), self.loop)
        return self

    def say(self, who: str, what: str) -> None:
        self.timeline.append(f"{self.loop.elapsed_s:11.6f} {who:8} {what}")

    async def _live(self) -> None:
        chance = self._chance
        host = self.network.host("router")
        self.replicas = [
            ScriptedReplica(self.network, f"r{number}", chance, self.say) for number in range(chance.randrange(2, 5))
        ]
        for replica in self.replicas:
            replica.start()
        front = await self._at(host, self._start(host))
        clients = [
            StreamingClient(f"c{number}", random.Random(f"{self.seed} client {number}"), (host.address, PORT), self.say)
            for number in range(chance.randrange(2, 9))
        ]
        until_s = self.loop.time() + LASTS_S
        living = [self._at(self.network.host(client.name), client.run(until_s)) for client in clients]
        await self._disturb(until_s)
        await asyncio.gather(*living)
        self.audit.clients([asked for client in clients for asked in client.asked], self.replicas)
        await asyncio.sleep(CALM_S)
        await self.audit.router(front, self.replicas)
        for replica in self.replicas:
            replica.kill()
        await self._at(host, self._end(front))

    async def _start(self, host: Host) -> Front:
        drawn = RouterConfig(
            replicas=tuple(replica.spec for replica in self.replicas),
            health_interval_s=self._chance.choice((0.5, 2.0)),
            policy=self._chance.choice(("cost", "round-robin", "least-loaded")),
            replica_limit=self._chance.choice((2, 8, 512)),
            queue_timeout_s=20.0,
            first_token_timeout_s=10.0,
            idle_timeout_s=10.0,
        )
        config = msgspec.structs.replace(drawn, **self._settings)
        front = Front(config, cast(Any, Bound((host.address, PORT))), clock=self.loop.time, seed=self.seed)
        front.router.history.access_log = cast(Any, AccessLog(self._answered))
        await front.start()
        return front

    async def _end(self, front: Front) -> None:
        self.audit.undrained(await front.drain(10.0))
        await front.close()

    def _at(self, host: Host, work: Any) -> "asyncio.Task[Any]":
        """Run it as a part of this host."""
        context = copy_context()
        context.run(HERE.set, host)
        return self.loop.create_task(work, context=context)

    # ---- faults

    async def _disturb(self, until_s: float) -> None:
        """One fault after the other, each over before the next begins at the same replica; one is always spared."""
        chance, loop = self._chance, self.loop
        faults: list[Callable[[ScriptedReplica], Awaitable[None]]] = [
            *(self._kill, self._cut, self._silence, self._restart),
        ]
        spared, *others = chance.sample(self.replicas, len(self.replicas))
        self.say("world", f"spares {spared.name}")
        troubled = [asyncio.create_task(self._trouble(replica, faults, until_s)) for replica in others]
        await asyncio.gather(*troubled)
        await asyncio.sleep(max(0.0, until_s - loop.time()))

    async def _trouble(
        self, replica: ScriptedReplica, faults: list[Callable[[ScriptedReplica], Awaitable[None]]], until_s: float
    ) -> None:
        while self._faults:
            await asyncio.sleep(self._chance.expovariate(1 / 6))
            if self.loop.time() >= until_s:
                return
            await self._chance.choice(faults)(replica)

    async def _kill(self, replica: ScriptedReplica) -> None:
        replica.kill()
        await asyncio.sleep(self._chance.choice((0.0, 0.001, 0.3, 3.0)))
        replica.start()

    async def _restart(self, replica: ScriptedReplica) -> None:
        """In order: it drains, ends, and is there again; or somebody has thought better of it."""
        replica.drain()
        await asyncio.sleep(self._chance.choice((0.0, 0.1, 1.0, 5.0)))
        if self._chance.random() < 0.3:
            self.say(replica.name, "takes requests again")
            replica.draining = False
        else:
            await self._kill(replica)

    async def _cut(self, replica: ScriptedReplica) -> None:
        count = replica.host.cut(self._chance)
        self.say("world", f"cuts {count} connections of {replica.name}")

    async def _silence(self, replica: ScriptedReplica) -> None:
        self.say("world", f"no packet from or to {replica.name}")
        replica.host.silence()
        await asyncio.sleep(self._chance.choice((0.05, 0.5, 2.0, 15.0)))
        replica.host.speak()
        self.say("world", f"packets from and to {replica.name} again")

    # ---- what is told

    def _answered(self, line: Line) -> None:
        self.audit.answered(line)
        self.say("router", f"{line.request_id} ended: {line.status}, {line.retries} retries, {line.resumes} resumes")

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        del loop
        self.say("loop", f"{context['message']}: {context.get('exception')!r}")
        self.audit.failures.append(f"{context['message']}: {context.get('exception')!r}")

    @contextmanager
    def _logged(self) -> Iterator[None]:
        """The router's own log as a part of the timeline."""
        handler = _Told(self.say)
        loggers = [logging.getLogger(name) for name in SPOKEN]
        before = [(logger.level, logger.propagate) for logger in loggers]
        for logger in loggers:
            logger.addHandler(handler)
            logger.setLevel(logging.INFO)
            logger.propagate = False
        try:
            yield
        finally:
            for logger, (level, propagate) in zip(loggers, before, strict=True):
                logger.removeHandler(handler)
                logger.setLevel(level)
                logger.propagate = propagate


class AccessLog:
    """Told instead of written."""

    def __init__(self, take: Callable[[Line], None]) -> None:
        self._take = take

    def add(self, line: bytes) -> None:
        self._take(msgspec.json.decode(line, type=Line))

    def close(self) -> None:
        """Nothing is open."""


class _Told(logging.Handler):
    def __init__(self, say: Callable[[str, str], None]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say("log", f"{record.levelname.lower()}: {record.getMessage()}")
        if record.exc_info:
            self._say("log", repr(record.exc_info[1]))
