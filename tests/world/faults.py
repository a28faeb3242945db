"""The faults of a world: one fault after the other at each replica but one, of kinds that the seed draws."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count

from tests.router.scripted import QUEUE_FULL
from tests.world.replica import ScriptedReplica

Say = Callable[[str, str], None]
Fault = Callable[["Faults", ScriptedReplica], Awaitable[None]]

EVERY_S = (3.0, 6.0, 15.0)  # at one replica
MOMENTS = ("health check", "request", "first token", "snapshot")  # right after which something may go wrong
AWAITED_S = 3.0
LONG_S = 4.0  # of a silence: long enough to be noticed
ROUTER = "10.0.0.1"  # the first host of a world
TOGETHER_S = 0.3  # the replicas of a machine that dies end within this time
ERROR = b'{"error":{"message":"a mistake","code":"mistake"}}'
ANSWERS = (*((status, ERROR) for status in (404, 429, 500, 501, 503)), (429, QUEUE_FULL))


class Faults:
    """`left_out` names faults that are not to come; whatever else happens stays as it was drawn."""

    def __init__(self, seed: int, replicas: Sequence[ScriptedReplica], say: Say, left_out: Collection[str]) -> None:
        chance = random.Random(f"{seed} faults")
        self.names: list[str] = []  # of those that came
        self._seed, self._replicas, self._say, self._left_out = seed, replicas, say, left_out
        self._kinds = chance.sample(KINDS, chance.randrange(1, len(KINDS) + 1))
        self._every_s = chance.choice(EVERY_S)
        self._spared = chance.choice(replicas)
        self._chance = chance  # of the present fault

    async def run(self, until_s: float) -> None:
        """Each fault is over before the next begins at the same replica."""
        self._say("world", f"spares {self._spared.name}; there is {', '.join(one.__name__ for one in self._kinds)}")
        troubled = [replica for replica in self._replicas if replica is not self._spared]
        async with asyncio.TaskGroup() as group:
            for replica in troubled:
                group.create_task(self._trouble(replica, until_s))

    async def _trouble(self, replica: ScriptedReplica, until_s: float) -> None:
        loop = asyncio.get_running_loop()
        for number in count(1):
            name = f"{replica.name} fault {number}"
            chance = random.Random(f"{self._seed} {name}")
            await asyncio.sleep(min(chance.expovariate(1 / self._every_s), until_s - loop.time()))
            if chance.random() < 0.7:
                await self._moment(replica, chance.choice(MOMENTS))
            if loop.time() >= until_s:
                return
            kind = chance.choice(self._kinds)
            if not replica.is_troubled and name not in self._left_out:
                self.names.append(name)
                replica.is_troubled, self._chance = True, chance
                await kind(self, replica)
                replica.is_troubled = False

    @staticmethod
    async def _moment(replica: ScriptedReplica, what: str) -> None:
        """Wait for it for a while."""
        with suppress(TimeoutError):
            async with asyncio.timeout(AWAITED_S):
                await replica.moment(what)

    async def kill(self, replica: ScriptedReplica) -> None:
        replica.kill()
        await asyncio.sleep(self._chance.choice((0.0, 0.001, 0.3, 3.0)))
        replica.start()

    async def machine(self, replica: ScriptedReplica) -> None:
        """A machine dies, on which others are, too: they end nearly at once."""

        async def die(one: ScriptedReplica) -> None:
            await asyncio.sleep(self._chance.random() * TOGETHER_S)
            one.kill()
            await asyncio.sleep(3.0)
            one.start()

        with self._with_others(replica) as those:
            await asyncio.gather(*map(die, those))

    @contextmanager
    def _with_others(self, replica: ScriptedReplica) -> Iterator[list[ScriptedReplica]]:
        """This one and those that are well, apart from the spared one."""
        others = [one for one in self._replicas if one is not self._spared and not one.is_troubled]
        for one in others:
            one.is_troubled = True
        yield [replica, *others]
        for one in others:
            one.is_troubled = False

    async def restart(self, replica: ScriptedReplica) -> None:
        """In order: it drains, ends, and is there again; or somebody has thought better of it."""
        if self._chance.random() < 0.5:
            await self._moment(replica, "health check")  # whose answer may arrive after that of a request
        replica.drain()
        await asyncio.sleep(self._chance.choice((0.0, 0.1, 1.0, 5.0)))
        if self._chance.random() < 0.3:
            self._say(replica.name, "takes requests again")
            replica.take_again()
        else:
            await self.kill(replica)

    async def cut(self, replica: ScriptedReplica) -> None:
        self._say("world", f"cuts {replica.host.cut(self._chance)} connections of {replica.name}")

    async def silence(self, replica: ScriptedReplica) -> None:
        await self._silence([replica], self._chance.choice((0.05, 0.5, LONG_S, 15.0)))

    async def outage(self, replica: ScriptedReplica) -> None:
        """The router's network is cut: nobody is heard, which is nobody's fault."""
        with self._with_others(replica) as those:
            await self._silence([*those, self._spared], self._chance.choice((0.5, LONG_S)))

    async def _silence(self, replicas: list[ScriptedReplica], seconds: float) -> None:
        """Let no packet from or to them pass. After a while, whatever is between may have forgotten connections."""
        names = ", ".join(one.name for one in replicas)
        self._say("world", f"no packet from or to {names}")
        for one in replicas:
            one.host.silence()
        await asyncio.sleep(seconds)
        loses = seconds >= LONG_S and self._chance.random() < 0.5
        lost = sum(one.host.lose(self._chance) for one in replicas) if loses else 0
        for one in replicas:
            one.host.speak()
        self._say("world", f"packets from and to {names} again, but for {lost} connections")

    async def errors(self, replica: ScriptedReplica) -> None:
        chance = self._chance
        replica.answers = lambda: chance.choice(ANSWERS)
        self._say(replica.name, "answers nothing but errors")
        await asyncio.sleep(chance.choice((0.1, 1.0, 5.0)))
        replica.answers = None

    async def hang(self, replica: ScriptedReplica) -> None:
        """Its engine computes nothing, though its server answers health checks."""
        self._say(replica.name, "hangs")
        replica.hangs = True
        await asyncio.sleep(self._chance.choice((1.0, 12.0)))
        replica.go_on()
        self._say(replica.name, "goes on")

    async def sockets(self, replica: ScriptedReplica) -> None:
        """The router has no socket left; nobody at the replica knows."""
        router = replica.network.hosts[ROUTER]
        self._say("router", "has no socket left")
        router.has_sockets = False
        await asyncio.sleep(self._chance.choice((0.1, 2.0)))
        router.has_sockets = True

    async def events(self, replica: ScriptedReplica) -> None:
        """Some of its events are lost, though its connections are well."""
        self._say(replica.name, "loses events")
        replica.publisher.lost_share = self._chance.choice((0.1, 1.0))
        await asyncio.sleep(self._chance.choice((0.5, 3.0)))
        replica.publisher.lost_share = 0.0


KINDS: list[Fault] = [
    *(Faults.kill, Faults.machine, Faults.restart, Faults.cut),
    *(Faults.silence, Faults.outage, Faults.errors, Faults.hang, Faults.sockets, Faults.events),
]
