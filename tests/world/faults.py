"""The faults of a world: one fault after the other at each replica but one, of kinds that the seed draws."""

import asyncio
import errno
import random
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import count
from typing import Any

from router.members.spec import ReplicaSpec
from router.tenants.keys import Key
from tests.router.scripted import QUEUE_FULL
from tests.world.edited import BROKEN, EditedFile
from tests.world.network import Host
from tests.world.publisher import EVENTS, STATUS
from tests.world.replica import ScriptedReplica

Say = Callable[[str, str], None]
Fault = Callable[["Faults", ScriptedReplica], Awaitable[None]]

CHANCE: ContextVar[random.Random] = ContextVar("chance")
EVERY_S = (3.0, 6.0, 15.0)  # at one replica
# Right after these something may go wrong.
MOMENTS = "health check", "request", "continuation", "effect", "first token", "snapshot"
AWAITED_S = 3.0
LONG_S = 4.0  # of a silence: long enough to be noticed
TOGETHER_S = 0.3  # the replicas of a machine that dies end within this time
ERROR = b'{"error":{"message":"a mistake","code":"mistake"}}'
STEPS_S = (-86_400.0, -3_600.0, -2.0, 2.0, 3_600.0, 86_400.0)  # of clocks on the wall
ANSWERS = (*((status, ERROR) for status in (404, 429, 500, 501, 503)), (429, QUEUE_FULL))


class Faults:
    """`left_out` names faults that are not to come; whatever else happens stays as it was drawn.

    `keys` and `fleet` are the files of keys and of replicas, in worlds that have them. In half of the worlds that are
    crowded, replicas are lost right after their first tokens, while requests of the same moment still wait.
    """

    def __init__(
        self,
        seed: int,
        replicas: Sequence[ScriptedReplica],
        routers: Sequence[Host],
        say: Say,
        left_out: Collection[str],
        keys: EditedFile[Key] | None,
        fleet: EditedFile[ReplicaSpec] | None,
        *,
        is_crowded: bool,
    ) -> None:
        chance = random.Random(f"{seed} faults")
        self.names: list[str] = []  # of those that came
        self.outages: list[tuple[float, float]] = []  # in which nobody was heard, the spared replica neither
        self._routers, self._keys, self._fleet = routers, keys, fleet
        self._seed, self._replicas, self._say, self._left_out = seed, replicas, say, left_out
        kinds = [*KINDS, *(OF_KEYS if keys else []), *(OF_FLEETS if fleet else [])]
        self._kinds = chance.sample(kinds, chance.randrange(1, len(kinds) + 1))
        self._moments = chance.sample(MOMENTS, chance.randrange(1, len(MOMENTS) + 1))
        self._every_s = chance.choice(EVERY_S)
        self._spared = chance.choice(replicas)
        if is_crowded and chance.random() < 0.5:
            self._kinds, self._moments, self._every_s = [Faults.kill, Faults.machine, Faults.cut], ["first token"], 3.0

    @property
    def _chance(self) -> random.Random:
        """The generator of the present fault, whatever else happens meanwhile."""
        return CHANCE.get()

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
                await self._moment(replica, chance.choice(self._moments))
            if loop.time() >= until_s:
                return
            kind = chance.choice(self._kinds)
            if not replica.is_troubled and name not in self._left_out:
                self.names.append(name)
                replica.is_troubled = True
                CHANCE.set(chance)
                await kind(self, replica)
                replica.is_troubled, replica.well_since_s = False, loop.time()

    async def lose_tails(self, until_s: float) -> None:
        """In some worlds, lose the last events of all replicas, after which none come that would show a gap."""
        chance, loop = random.Random(f"{self._seed} tails"), asyncio.get_running_loop()
        if chance.random() < 0.3:
            await asyncio.sleep(until_s - chance.choice((0.0, 1.0, 5.0)) - loop.time())
            for replica in self._replicas:
                if replica.publisher.subscribers[STATUS]:  # else nothing but a later batch could show it
                    self._say(replica.name, "loses its last events")
                    replica.publisher.lost_share = 1.0

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
            one.is_troubled, one.well_since_s = False, one.loop.time()

    async def restart(self, replica: ScriptedReplica) -> None:
        """In order: it drains, ends, and is there again; or somebody has thought better of it."""
        if self._chance.random() < 0.5:
            await self._moment(replica, "health check")
            await self.packets(replica)  # its answer may arrive after that of a request
        replica.drain()
        await self._break_others(replica)
        await asyncio.sleep(self._chance.choice((0.0, 0.1, 1.0, 5.0)))
        if self._chance.random() < 0.3:
            self._say(replica.name, "takes requests again")
            replica.take_again()
        else:
            await self.kill(replica)

    async def cut(self, replica: ScriptedReplica) -> None:
        error = OSError(errno.EHOSTUNREACH, "No route to host") if self._chance.random() < 0.3 else None
        how = "cuts" if error is None else "has no way for"
        self._say("world", f"{how} {replica.host.cut(self._chance, error)} connections of {replica.name}")

    async def packets(self, replica: ScriptedReplica) -> None:
        self._say("world", f"loses packets of {replica.name}, which sends them again")
        replica.host.lose_packets(self._chance.choice((0.2, 0.4, 0.8)))

    async def _break_others(self, replica: ScriptedReplica) -> None:
        """At times an answer of another one breaks just as this one takes none, and the others have no room for it."""
        chance = self._chance
        with self._with_others(replica) as those:
            if chance.random() < 0.5:
                others = [*those[1:], self._spared]
                other = chance.choice(others)
                await self._moment(other, "first token")
                full = [one for one in others if not one.is_crowded and chance.random() < 0.8]
                for one in full:
                    one.is_crowded = True
                await self.cut(other)
                await asyncio.sleep(chance.choice((0.1, 0.5)))
                for one in full:
                    one.is_crowded = False

    async def silence(self, replica: ScriptedReplica) -> None:
        await self._silence([replica], self._chance.choice((0.05, 0.5, LONG_S, 15.0)))

    async def outage(self, replica: ScriptedReplica) -> None:
        """The router's network is cut: nobody is heard, which is nobody's fault."""
        began_s = replica.loop.time()
        with self._with_others(replica) as those:
            await self._silence([*those, self._spared], self._chance.choice((0.5, LONG_S, LONG_S)), losing=1.0)
        self.outages.append((began_s, replica.loop.time()))

    async def _silence(self, replicas: list[ScriptedReplica], seconds: float, losing: float = 0.5) -> None:
        """Let no packet from or to them pass. After a while, whatever is between may have forgotten connections.

        `losing`: how likely that is.
        """
        names = ", ".join(one.name for one in replicas)
        self._say("world", f"no packet from or to {names}")
        for one in replicas:
            one.host.silence()
        await asyncio.sleep(seconds)
        loses = seconds >= LONG_S and self._chance.random() < losing
        share = self._chance.choice((0.5, 1.0))
        lost = sum(one.host.lose(self._chance, share) for one in replicas) if loses else 0
        for one in replicas:
            one.host.speak()
        self._say("world", f"packets from and to {names} again, but for {lost} connections")

    async def flap(self, replica: ScriptedReplica) -> None:
        """A link that comes and goes, at times for too short to be noticed."""
        chance = self._chance
        for _ in range(chance.randrange(3, 9)):
            await self._silence([replica], chance.choice((0.02, 0.3, 1.5)))
            await asyncio.sleep(chance.choice((0.02, 0.3, 1.5)))

    async def errors(self, replica: ScriptedReplica) -> None:
        chance = self._chance
        replica.answers = lambda: chance.choice(ANSWERS)
        self._say(replica.name, "answers nothing but errors")
        await self._break_others(replica)
        await asyncio.sleep(chance.choice((0.1, 1.0, 5.0)))
        replica.answers = None

    async def crowd(self, replica: ScriptedReplica) -> None:
        """Let others, who ask without the router, have all room of the replicas, also when answers break."""
        chance = self._chance
        those = [replica] if chance.random() < 0.3 else [one for one in self._replicas if not one.is_crowded]
        for one in those:
            one.is_crowded = True
        self._say("world", f"no room at {', '.join(one.name for one in those)}")
        if chance.random() < 0.5:
            await self.cut(replica)
        await self._break_others(replica)
        await asyncio.sleep(chance.choice((0.05, 0.5, 2.0)))
        for one in those:
            one.is_crowded = False
        self._say("world", f"room at {', '.join(one.name for one in those)}")

    async def hang(self, replica: ScriptedReplica) -> None:
        """Its engine computes nothing, though its server answers health checks."""
        self._say(replica.name, "hangs")
        replica.hangs = True
        await asyncio.sleep(self._chance.choice((1.0, 12.0)))
        replica.go_on()
        self._say(replica.name, "goes on")

    async def sockets(self, replica: ScriptedReplica) -> None:
        """A router has no socket left; nobody at the replica knows. At times answers break just then."""
        router = self._chance.choice(self._routers)
        self._say(router.name, "has no socket left")
        router.has_sockets = False
        if self._chance.random() < 0.5:
            await self.cut(replica)
        await asyncio.sleep(self._chance.choice((0.1, 2.0)))
        router.has_sockets, router.troubled_s = True, replica.loop.time()

    async def events(self, replica: ScriptedReplica) -> None:
        """Some of its events are lost, though its connections are well."""
        self._say(replica.name, "loses events")
        replica.publisher.lost_share = self._chance.choice((0.1, 1.0))
        await asyncio.sleep(self._chance.choice((0.5, 3.0)))
        replica.publisher.lost_share = 0.0

    async def late(self, replica: ScriptedReplica) -> None:
        """Its events come late, though it is heard in time."""
        ends = [peer.transport.peer for peer in replica.publisher.subscribers[EVENTS]]  # type: ignore[attr-defined]
        before = [end.delays_s for end in ends]
        delay_s = self._chance.choice((0.05, 1.0, 3.0))
        self._say(replica.name, f"sends its events {delay_s} s late")
        for end in ends:
            end.delays_s = (delay_s,)
        await asyncio.sleep(self._chance.choice((1.0, 6.0)))
        for end, delays_s in zip(ends, before, strict=True):
            end.delays_s = delays_s

    async def clock(self, replica: ScriptedReplica) -> None:
        """Somebody sets the clocks on the wall."""
        step_s = self._chance.choice(STEPS_S)
        self._say("world", f"sets all clocks by {step_s:+.0f} s")
        replica.loop.clocks_s.append(replica.loop.clocks_s[-1] + step_s)

    # ---- an operator's

    async def keys(self, replica: ScriptedReplica) -> None:
        """Remove a key, or change what it may do, for a while."""
        del replica
        assert self._keys is not None, "else it is no kind"
        file, chance = self._keys, self._chance
        name, what = chance.choice([*file.tables]), chance.choice(("removed", "limited", "salted"))
        fields = file.tables[name]
        changed = {
            "removed": None,
            "limited": {**fields, "max_in_flight": 1, "tokens_per_minute": 500},
            "salted": {**fields, "salt": not fields["salt"]},
        }
        await self._edit(file, name, changed[what])

    async def spec(self, replica: ScriptedReplica) -> None:
        """Name a replica no more, or otherwise, for a while."""
        assert self._fleet is not None, "else it is no kind"
        fields = self._fleet.tables[replica.name]
        changed = self._chance.choice((None, {**fields, "draining": True}, {**fields, "max_model_len": 4095}))
        await self._edit(self._fleet, replica.name, changed)

    async def scale(self, replica: ScriptedReplica) -> None:
        """The fleet becomes smaller, in order or not, and larger again."""
        assert self._fleet is not None, "else it is no kind"
        chance = self._chance

        async def leave() -> None:
            await asyncio.sleep(chance.choice((0.0, 1.0, 3.0)))
            replica.drain()
            await asyncio.sleep(chance.choice((0.1, 1.0, 5.0)))
            replica.kill()
            await asyncio.sleep(chance.choice((0.5, 3.0, 8.0)))
            replica.start()

        await asyncio.gather(leave(), self._edit(self._fleet, replica.name, None))

    async def _edit(self, file: EditedFile[Any], name: str, fields: Mapping[str, Any] | None) -> None:
        """Change one table or remove it, and put it back; a file that is written in place is broken at first."""
        if file.is_edited:
            return
        chance, file.is_edited = self._chance, True
        without = {one: table for one, table in file.tables.items() if one != name}
        for tables in (without if fields is None else {**file.tables, name: fields}, file.tables):
            if chance.random() < 0.3:
                self._say("operator", "breaks a file")
                file.break_(chance.choice(BROKEN))
                await asyncio.sleep(chance.choice((0.001, 0.5, 3.0)))
            is_before = tables is file.tables
            self._say("operator", f"{name} is {'as before' if is_before else 'changed' if fields else 'removed'}")
            file.write(tables)
            for replica in self._replicas:
                replica.forgets()
            if not is_before:
                await asyncio.sleep(chance.choice((0.5, 1.5, 4.0, 10.0)))
        file.is_edited = False


KINDS: list[Fault] = [
    *(Faults.kill, Faults.machine, Faults.restart, Faults.cut, Faults.packets, Faults.silence, Faults.outage),
    *(Faults.flap, Faults.errors, Faults.crowd, Faults.hang, Faults.sockets, Faults.events, Faults.late, Faults.clock),
]
OF_KEYS: list[Fault] = [Faults.keys]
OF_FLEETS: list[Fault] = [Faults.spec, Faults.scale]
