"""A whole world from one seed: what is in it, what happens, and what must hold at its end."""

import asyncio
import io
import logging
import random
import tempfile
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, redirect_stdout
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec

from router.config import RouterConfig
from router.members.spec import ReplicaSpec, parse_replicas
from router.process.front import Front
from router.proxy.attempt import Attempt
from router.proxy.retries import Row
from router.records.access_log import Line
from router.tenants.keys import Key
from tests.world.audit import FIRST_TOKEN_TIMEOUT_S, QUEUE_TIMEOUT_S, Audit, Routed
from tests.world.client import WORDS, Asking
from tests.world.cluster import ClusterOfPods
from tests.world.edited import EditedFile, keys_by_name
from tests.world.engine import EngineReplica
from tests.world.faults import Faults
from tests.world.loop import SETTLES_S, WorldLoop, run
from tests.world.network import HERE, Bound, Host, Network
from tests.world.publisher import PeerSockets
from tests.world.replica import TOOL, ScriptedReplica
from tests.world.sglang import SglangReplica
from tests.world.vllm import VllmReplica

PORT, PEERS = 8000, 5570
ROUTERS, CROWDED_ROUTERS = (1, 1, 1, 2, 3, 4), (1, 1, 1, 2)
LASTS_S = 60.0  # with clients and faults; several routers share the time, since each costs as much
LEAST_S = 20.0  # of several
CALM_S = 10.0  # after the last fault: then the router knows everything again
DRAINS_S = 60.0  # at most: longer than any request
LULL_S = 10.0  # in some worlds nobody asks anything for this long
STEP_S = 0.5  # between two looks at everything
PARTED_S = (0.2, 1.0, 8.0)  # two routers: the longest is long enough to be forgotten
GRAINS_S = (1e-6, 1e-4, 1e-3)  # of time
CROWDED_GRAINS_S = (1e-3, 5e-3)  # with the latter, nearly all that is sent at one moment comes at one, too
SLOW_SHARES = (0.0, 0.1, 0.5)  # of connections
KINDS: tuple[tuple[type[ScriptedReplica], ...], ...] = (  # of the replicas of a world
    *((ScriptedReplica,), (ScriptedReplica, VllmReplica), (VllmReplica,)),
    *((EngineReplica,), (EngineReplica, ScriptedReplica), (EngineReplica, VllmReplica)),
    *((SglangReplica,), (SglangReplica, ScriptedReplica)),
)
TENANTS = ("red", "green", "blue")
SPOKEN = ("router", "replica", "events", "api", "asyncio")


class World:
    """`faults=False` leaves the same world undisturbed; `settings` are the router's, beside those that are drawn.

    `routers`: so many at least. `left_out` names requests and faults that are not to come. `lasts_s`: not as drawn.
    """

    def __init__(
        self,
        seed: int,
        *,
        faults: bool = True,
        left_out: Collection[str] = (),
        routers: int = 0,
        lasts_s: float = 0.0,
        **settings: Any,
    ) -> None:
        self.seed = seed
        self.timeline: list[str] = []
        self._is_disturbed, self._left_out = faults, left_out
        chance = self._chance = random.Random(f"{seed} script")
        self._is_crowded = chance.random() < 0.25  # all ask at once, and there is hardly any room
        grain_s = chance.choice(CROWDED_GRAINS_S if self._is_crowded else GRAINS_S)
        self.loop = WorldLoop(random.Random(f"{seed} loop"), grain_s)
        self.network = Network(self.loop, str(seed), chance.choice(SLOW_SHARES))
        self.loop.set_exception_handler(self._failed)
        drawn = CROWDED_ROUTERS if self._is_crowded else ROUTERS
        names = ["router", *(f"router{number}" for number in range(2, max(routers, chance.choice(drawn)) + 1))]
        self.routers = {host: Routed(host) for host in map(self.network.host, names)}
        # In a crowd, some of few replicas are ours: any other goes on with their answers.
        ours = [kinds for kinds in KINDS if not issubclass(kinds[0], VllmReplica)]
        kinds, most = (chance.choice(ours), 3) if self._is_crowded else (chance.choice(KINDS), 5)
        names = [f"r{number}" for number in range(chance.randrange(2, most + 1))]
        self.replicas = [chance.choice(kinds)(self.network, name, chance, self.say) for name in names]
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        self.keys: EditedFile[Key] | None = None
        self.fleet: EditedFile[ReplicaSpec] | None = None  # None: the router's options name the replicas
        self.cluster: ClusterOfPods | None = None  # the same, if it is no file
        if not self._is_crowded and chance.random() < 0.6:
            keys = {name: self._key(name) for name in TENANTS}
            self.keys = EditedFile(folder / "keys.toml", "keys.{}", keys, keys_by_name, self.loop)
        if chance.random() < 0.4:
            specs = {replica.name: msgspec.to_builtins(replica.spec) for replica in self.replicas}
            self.fleet = EditedFile(folder / "replicas.toml", "[replicas]", specs, parse_replicas, self.loop)
            if random.Random(f"{seed} cluster").random() < 0.5:
                self.fleet = self.cluster = ClusterOfPods(folder, specs, self.network, self.replicas, seed)
        self._lasts_s = lasts_s or max(min(LEAST_S, LASTS_S), LASTS_S / len(self.routers))
        self._restarts = chance.random() < 0.3
        self._parts = chance.random() < 0.5  # routers from each other
        self._config = msgspec.structs.replace(self._draw(), **settings)
        self.audit = Audit(self.replicas, self.routers.values(), self.keys, self.fleet)
        files, hosts = (self.keys, self.fleet), list(self.routers)
        self.faults = Faults(seed, self.replicas, hosts, self.say, left_out, *files, is_crowded=self._is_crowded)
        self.audit.outages = self.faults.outages

    def run(self) -> "World":
        """Fill `audit.failures` with whatever does not hold."""
        with self._logged():
            try:
                run(self._live(), self.loop)
            except Exception as error:  # any error is a finding
                self.timeline += traceback.format_exc().splitlines()
                self.audit.fail(repr(error))
        self._folder.cleanup()
        return self

    def say(self, who: str, what: str) -> None:
        self.timeline.append(f"{self.loop.elapsed_s:11.6f} {who:8} {what.replace(self._folder.name, '')}")

    @property
    def parts(self) -> list[str]:
        """The names of the requests and faults that came."""
        return [*self.audit.asked, *self.faults.names]

    async def _live(self) -> None:
        for replica in self.replicas:
            replica.start()
        if (cluster := self.cluster) is not None:
            await self._at(cluster.host, cluster.api.start())
        for front in [await self._at(host, self._start(host)) for host in self.routers]:
            while front.router.lifecycle.not_ready() is not None:
                await asyncio.sleep(STEP_S)
        clients = self._clients()
        until_s = self.loop.time() + self._lasts_s
        living = [self._at(self.network.host(client.name), client.run(until_s)) for client in clients]
        stepping = [asyncio.create_task(self._step())]
        if cluster is not None:
            stepping.append(asyncio.create_task(cluster.look_after()))
        if self._is_disturbed:
            faults: list[Any] = [self.faults.run(until_s), self.faults.lose_tails(until_s)]
            if cluster is not None:
                faults.append(self._at(cluster.host, cluster.trouble(until_s, self.say)))
            await asyncio.gather(*faults, self._restart(until_s), self._part(until_s))
        await asyncio.gather(*living)
        self.audit.clients()
        await asyncio.sleep(CALM_S)
        for task in stepping:
            assert not task.done(), task
            task.cancel()
        for routed in self.routers.values():
            await self.audit.router(routed)
        for replica in self.replicas:
            replica.kill()
        for host in self.routers:
            await self._at(host, self._end(host))
        if cluster is not None:
            await self._at(cluster.host, cluster.api.stop())

    def _key(self, name: str) -> dict[str, Any]:
        chance = self._chance
        return {
            "key": name,
            "salt": chance.random() < 0.5,
            "max_in_flight": chance.choice((None, None, 2)),
            "tokens_per_minute": chance.choice((None, None, 3_000)),
            "tokens_per_day": chance.choice((None, 1_000_000)),
        }

    def _clients(self) -> list[Asking]:
        chance = self._chance
        beginnings = ["", *(" ".join(chance.choices(WORDS, k=60)) + "\n" for _ in range(3))]
        together_s = chance.choice((1.0, 5.0) if self._is_crowded else (0.0, 0.0, 1.0))
        lull_s = self.loop.time() + chance.uniform(5.0, self._lasts_s)
        lull = lull_s, lull_s + chance.choice((0.0, 0.0, LULL_S))
        clients = []
        for number in range(chance.randrange(6, 13) if self._is_crowded else chance.randrange(2, 9)):
            name, own = f"c{number}", random.Random(f"{self.seed} client {number}")
            key = chance.choice(TENANTS) if self.keys else None
            host = list(self.routers)[number % len(self.routers)]
            self.audit.by_client[name] = self.routers[host]
            where = host.address, PORT
            asked, left_out = self.audit.asked, self._left_out
            clients.append(Asking(name, own, where, self.say, asked, left_out, key, beginnings, together_s, lull))
        return clients

    async def _step(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            self.audit.step(self.loop.time())

    async def _start(self, host: Host) -> Front:
        for file in (self.keys, self.fleet):
            if file is not None:
                file.mend()
        for replica in self.replicas:
            replica.forgets(host)
        config, routed = self._config, self.routers[host]
        if len(self.routers) > 1:
            listen, *peers = (f"tcp://{one.address}:{PEERS}" for one in (host, *self.routers))  # one of them is itself
            config = msgspec.structs.replace(config, peer_listen=listen, peers=tuple(peers))
        sockets: Any = partial(PeerSockets, self.network)
        bound: Any = Bound((host.address, PORT))
        front = Front(config, bound, sockets=sockets, clock=self.loop.time, seed=self.seed)
        front.router.history.access_log = cast(Any, AccessLog(partial(self._answered, host)))
        routed.front, routed.latest = front, set()
        routed.starts_s.append(self.loop.time())
        honest = front.router.learn

        def learn(attempt: Attempt, row: Row, reason: str) -> None:
            self.audit.reached[row.what, _column(attempt)] += 1
            if row.retries == "three":
                self.audit.lost(cast(Any, attempt.owner).flow.port.admitted.request_id, self.loop.time())
            honest(attempt, row, reason)

        front.router.learn = learn  # type: ignore[method-assign]
        await front.start()
        return front

    def _draw(self) -> RouterConfig:
        chance = self._chance
        return RouterConfig(
            replicas=() if self.fleet else tuple(replica.spec for replica in self.replicas),
            replicas_file=None if self.fleet is None or self.cluster else str(self.fleet.path),
            kubernetes=self.cluster.config if self.cluster else None,
            client_paths=(TOOL,),
            api_keys_file=None if self.keys is None else str(self.keys.path),
            demand_key=bool(self.keys),
            health_interval_s=chance.choice((0.5, 2.0)),
            policy=chance.choice(("cost", "cost", "round-robin", "least-loaded")),
            replica_limit=1 if self._is_crowded else chance.choice((2, 8, 512)),
            queue_size=chance.choice((1, 1, 2) if self._is_crowded else (2, 1024, 1024)),
            queue_timeout_s=QUEUE_TIMEOUT_S,
            first_token_timeout_s=FIRST_TOKEN_TIMEOUT_S,
            idle_timeout_s=10.0 if any(isinstance(replica, VllmReplica) for replica in self.replicas) else 120.0,
        )

    async def _restart(self, until_s: float) -> None:
        """In some worlds, restart a router now and then, in order."""
        chance = random.Random(f"{self.seed} router")
        while self._restarts and self.loop.time() < until_s:
            await asyncio.sleep(min(chance.expovariate(1 / 20), until_s - self.loop.time()))
            host = chance.choice(list(self.routers))
            self.say(host.name, "drains")
            await self._at(host, self._end(host))
            await asyncio.sleep(chance.choice((SETTLES_S, 1.0)))
            self.audit.ended(host)
            await self._at(host, self._start(host))
            self.say(host.name, "is there again")

    async def _part(self, until_s: float) -> None:
        """In some worlds, let two routers not hear of each other for a while."""
        chance = random.Random(f"{self.seed} parts")
        while self._parts and len(self.routers) > 1 and self.loop.time() < until_s:
            await asyncio.sleep(min(chance.expovariate(1 / 15), until_s - self.loop.time()))
            one, other = chance.sample(list(self.routers), 2)
            self.say("world", f"no packet between {one.name} and {other.name}")
            one.part(other)
            await asyncio.sleep(chance.choice(PARTED_S))
            one.meet(other)
            self.say("world", f"packets between {one.name} and {other.name} again")

    async def _end(self, host: Host) -> None:
        routed = self.routers[host]
        assert routed.front is not None, "it was started"
        self.audit.drained(await routed.front.drain(DRAINS_S))
        front, routed.front = routed.front, None
        await front.close()

    def _at(self, host: Host, work: Any) -> "asyncio.Task[Any]":
        """Run it as a part of this host."""
        context = copy_context()
        context.run(HERE.set, host)
        return self.loop.create_task(work, context=context)

    # ---- what is told

    def _answered(self, host: Host, line: Line) -> None:
        self.audit.answered(self.routers[host], line)
        self.say(host.name, f"{line.request_id} ended: {line.status}, {line.retries} retries, {line.resumes} resumes")

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        del loop
        self.say("loop", f"{context['message']}: {context.get('exception')!r}")
        self.audit.fail(f"{context['message']}: {context.get('exception')!r}")

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
            with redirect_stdout(io.StringIO()):  # of replicas, that they are ready
                yield
        finally:
            for logger, (level, propagate) in zip(loggers, before, strict=True):
                logger.removeHandler(handler)
                logger.setLevel(level)
                logger.propagate = propagate


def _column(attempt: Attempt) -> str:
    """The column of the table of retries that holds for a request which has failed."""
    port = cast(Any, attempt.owner).flow.port
    return "sent" if port.has_begun else "repeatable" if port.may_repeat else "effects"


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
            self._say("log", "".join(traceback.format_exception(record.exc_info[1])[-3:]))
