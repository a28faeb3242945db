"""Keeps the router's knowledge of its replicas up to date: which exist, their models and their health.

Only tasks and timers; `learning`, `suspects`, `health` and `load` interpret the answers. A `Server` has the task and
the health; each of its data-parallel ranks is a `Member`, which has a cache and a load.
"""

import asyncio
import logging
import os
import random
import ssl
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import msgspec

from api.process.tasks import end
from events.native import NO_INCARNATION, Status
from router.members.broken import Broken
from router.members.facts import Rank
from router.members.health import ASLEEP, Health, HealthConfig
from router.members.members import Server
from router.members.spec import BadSpec, Desired, ReplicaSpec
from router.members.upstream import Upstream
from router.monitor.learning import PROBE_S, Learning, ask
from router.monitor.suspects import GIVEN_UP_S, QUIET_S, RECOVERY_S, RunningRequests, SuspectDetector, is_quiet
from router.proxy.retries import refusal_code

log = logging.getLogger(__name__)

TICK_S = 0.1
LATE_S = 0.1  # the clock may be late by this much; beyond that, the router stood still
MAX_BACKOFF_S = 5.0  # a replica that comes up should not wait for long
LEARN_AGAIN_S = 4.0  # so that an adapter is noticed within five
NATIVE_PROBE_S = 1.0  # our replicas answer whatever else they do
UNANSWERED = 3  # checks in a row, of another engine, whose server may be slow while it works


@dataclass(eq=False)
class Upkeep:
    """Owns one task per server, for as long as its replica is desired."""

    learning: Learning
    requests: RunningRequests
    seed: int | None = None  # the seed of its random numbers, if given

    def __post_init__(self) -> None:
        self.config, self.members = self.learning.config, self.learning.members
        self.placement, self.now_s = self.learning.placement, self.learning.now_s
        self.added: dict[str, ReplicaSpec] = {}  # replicas that a request has added, not discovery
        self.wanted: Desired = {}
        self.suspects = SuspectDetector(self.members.servers, self.requests, self.now_s)
        self._servers = self.members.servers
        self._to_drain: set[str] = set()  # once they are there
        self._rng = random.Random(self.seed)
        self._health_config = HealthConfig(
            faults_to_open=self.config.breaker_faults,
            most_backoff_s=MAX_BACKOFF_S,
            slow_start_s=self.config.slow_start_s,
            probe_interval_s=self.config.health_interval_s,
        )
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._due: dict[str, asyncio.Event] = {}  # set when a replica is to be checked
        self._leaving: set[asyncio.Task[None]] = set()
        self._stood_still_s = 0.0  # altogether

    # ---- which replicas there are

    def apply(self, wanted: Desired) -> None:
        """Apply the result of discovery; replicas added by request stay, unless discovery names one the same."""
        self.wanted = wanted
        for name in wanted.keys() & self.added.keys():
            log.warning("%s: replacing the replica of this name that was added by request", name)
            del self.added[name]
        goal = wanted | self.added
        added = {name: spec for name, spec in goal.items() if name not in self._servers}
        is_changed = bool(added)
        try:
            for name, server in list(self._servers.items()):
                spec = goal.get(name)
                if spec == server.spec:
                    continue
                is_changed = True
                if spec is not None and msgspec.structs.replace(server.spec, draining=spec.draining) == spec:
                    (server.health.drain if spec.draining else server.health.undrain)()  # the cache stays known
                    server.spec = spec
                    continue
                with _going_on(name):  # an error must not stop the others
                    self._remove(name)
                if spec is not None:
                    added[name] = spec
            for spec in added.values():
                with _going_on(spec.name):
                    self._add(spec)
        finally:
            if is_changed:
                self.members.arrange()

    def add(self, spec: ReplicaSpec) -> None:
        """Add a replica by request; raise BadSpec if its name is taken or its key is not available."""
        if self.members.server(spec.name) is not None:
            raise BadSpec(f"a replica named {spec.name!r} is there already; remove it first, or choose another name")
        spec.api_key(os.environ)
        self.added[spec.name] = spec
        self.apply(self.wanted)
        if spec.name not in self._servers:
            self.added.pop(spec.name, None)
            raise BadSpec(f"{spec.name!r} could not be added; the router's log says why")

    def remove(self, name: str) -> None:
        """Remove a replica added by request; raise BadSpec if discovery names it, since it would be back at once."""
        if name in self.wanted:
            raise BadSpec(f"{name!r} is named by the router's discovery; remove it there, or drain it here")
        del self.added[name]
        self.apply(self.wanted)

    def catch_up(self, added: Mapping[str, ReplicaSpec], draining: Iterable[str]) -> None:
        """Make the changes by request that another worker knows of."""
        self._to_drain.update(draining)
        for name, server in self._servers.items():
            if name in self._to_drain:
                server.health.drain()
        self._to_drain -= self._servers.keys()
        self.added = {**added, **self.added}
        self.apply(self.wanted)

    def _add(self, spec: ReplicaSpec) -> None:
        # A request chooses the URL, and must not get the router's key sent there.
        key = spec.api_key(os.environ, None if spec.name in self.added else self.config.replica_api_key)
        target = spec.target
        tls = ssl.create_default_context() if target.tls else None
        upstream = Upstream(target, self.config.connect_timeout_s, tls)
        health = Health(self._rng, self.now_s(), self._health_config)
        server = Server(spec, upstream, health)
        if key is not None:
            server.key_line = b"authorization: Bearer %b\r\n" % key.encode()
        if spec.draining or spec.name in self._to_drain:
            health.drain()
            self._to_drain.discard(spec.name)
        self.learning.arrange(server, (Rank(spec),))
        self._servers[spec.name] = server
        due = self._due[spec.name] = asyncio.Event()
        due.set()
        self._tasks[spec.name] = asyncio.create_task(self._keep(server, due))
        log.info("%s: added, %s", spec.name, spec.url)

    def _remove(self, name: str) -> None:
        """Remove a replica: it gets no new requests, and running ones may end."""
        server = self._servers.pop(name)
        self._tasks.pop(name).cancel()
        del self._due[name]
        leaving = asyncio.create_task(self._leave(server))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)
        leaving.add_done_callback(lambda _: server.upstream.close())  # the router may end first
        self.learning.forget(server)
        log.info("%s: removed", name)

    async def _leave(self, server: Server) -> None:
        reason = "it was removed, and its time to drain is over"
        with suppress(TimeoutError):
            async with asyncio.timeout(self.config.drain_timeout_s):
                reason = await self._emptied(server) or reason
        with _going_on(server.name):
            server.upstream.break_all(reason)

    async def _emptied(self, server: Server) -> str | None:
        """Wait until the replica's requests have ended; return the reason if it is lost, found by probes."""
        upstream = server.upstream
        quiet_since_s = self.now_s()
        while upstream.sendings:
            await asyncio.sleep(TICK_S)
            now_s = self.now_s()
            if upstream.spoken or not server.profile.answers_at_once:
                upstream.spoken, quiet_since_s = False, now_s
            elif now_s - quiet_since_s > GIVEN_UP_S:
                try:
                    await ask(server, server.profile.health_path, timeout_s=NATIVE_PROBE_S)
                except Broken as broken:
                    if broken.silent or not broken.refused:  # a server that ends refuses connections, and still answers
                        return str(broken)
                else:
                    if server.suspicion:  # some of its connections may have died meanwhile
                        self.suspects.recovered(server, self.now_s())
                quiet_since_s = self.now_s()
            if now_s - server.recovered_s > RECOVERY_S:
                self.requests.move_unheard({server: list(self.members)})
        return None

    async def close(self) -> None:
        await end([*self._tasks.values(), *self._leaving])
        await self.learning.close()
        for server in self._servers.values():
            server.upstream.close()

    # ---- one replica

    async def _keep(self, server: Server, due: asyncio.Event) -> None:
        """Find out the replica's engine and model, then check its health repeatedly."""
        unanswered = 0  # checks in a row
        while True:
            await due.wait()
            due.clear()
            with _going_on(server.name):
                now_s = self.now_s()
                if self._is_due(server, now_s):  # it may have been looked at meanwhile
                    server.health.probing(now_s)
                    unanswered = 0 if await self._check(server) else unanswered + 1
                    # Another engine is suspected that leaves several checks in a row unanswered, and says nothing else.
                    silent_s = self.now_s() - server.quiet_since_s
                    quiet = not server.upstream.spoken and silent_s > PROBE_S + QUIET_S
                    if unanswered >= UNANSWERED and not server.profile.answers_at_once and quiet:
                        reason = f"it has not answered {unanswered} health checks in a row"
                        self.suspects.suspect(server, reason, server.quiet_since_s)
                elif self._is_outdated(server, now_s):
                    with suppress(Broken):  # the health checks judge it
                        await self.learn_again(server)

    def _is_due(self, server: Server, now_s: float) -> bool:
        health = server.health
        return health.probe_due(now_s) or is_quiet(server, now_s) or self.suspects.is_doubtful(server, now_s)

    def _is_outdated(self, server: Server, now_s: float) -> bool:
        """Return whether to ask again a replica that loads and unloads adapters without a word."""
        facts = server.facts
        asks = self.config.health_interval_s > 0 and server.learned and facts is not None and facts.changes_adapters
        return asks and now_s - server.learned_s >= LEARN_AGAIN_S and server.health.breaker == "closed"

    async def learn_again(self, server: Server) -> None:
        """Ask a replica again what it serves; raise Broken if it does not answer."""
        server.learned_s = self.now_s()
        try:
            await self.learning.learn(server)
        except BadSpec as error:
            self._failed(server, str(error))

    async def _check(self, server: Server) -> bool:
        """Check the replica once; return whether it answered at all."""
        stood_still_s = self._stood_still_s
        try:
            if not server.learned or server.health.silent:  # it may have restarted unseen
                await self.learning.learn(server)
            await self._probe(server)
        except Broken as error:
            if error.ours:  # this says nothing about the replica
                log.error("%s: cannot check its health: %s", server.name, error)
                return True
            if error.silent and self._stood_still_s - stood_still_s > NATIVE_PROBE_S / 2:
                return True  # the router itself stood still
            self._failed(server, str(error), silent=error.silent)
            return False
        except BadSpec as error:
            self._failed(server, str(error))
        except Exception as error:  # a mistake of our own: ask it again
            self._stumbled(server, error)
            self._failed(server, repr(error))
        return True

    @staticmethod
    def _stumbled(server: Server, error: Exception) -> None:
        """Log a mistake of the router's own, once for as long as it stays the same."""
        if server.trouble != repr(error):
            log.error("%s: the router's own mistake", server.name, exc_info=error)
        server.trouble = repr(error)

    def _failed(self, server: Server, reason: str, *, silent: bool = False) -> None:
        server.learned = False  # the next answer may come from another process
        if server.trouble != reason:  # logged once, not every half second
            is_planned = server.health.draining or server.health.resting is not None  # then it may end at any moment
            log.log(logging.INFO if is_planned else logging.WARNING, "%s: %s", server.name, reason)
        server.trouble = reason
        server.faults += 1
        now_s = self.now_s()
        server.health.probed(False, reason, now_s, silent=silent)
        if is_quiet(server, now_s):
            server.health.fault(reason, now_s, refused=True, silent=silent)
            if silent:
                self.suspects.suspect(server, reason, server.quiet_since_s)
            else:
                server.upstream.break_all(reason)

    async def _probe(self, server: Server) -> None:
        profile = server.profile
        timeout_s = NATIVE_PROBE_S if profile.answers_at_once else PROBE_S
        answer = await ask(server, profile.health_path, timeout_s=timeout_s)
        now_s = self.now_s()
        if answer.status == 200:
            if server.verified is None:
                await self.learning.verify(server)
            self.learning.warn_of_salts(server)
            server.trouble = ""
            server.health.probed(True, "", now_s)
        elif answer.status == 503 and refusal_code(answer.body) == "draining":
            server.health.rests("it drains")
        else:
            self._failed(server, f"it answers its health check with status {answer.status}")
        if profile.is_scraped:
            scraped = await ask(server, "/metrics")
            if scraped.status == 200:
                self.learning.scraped(server, scraped.body, now_s)
                self.suspects.scraped(server, scraped.body, now_s)
            if server.health.stalled not in (None, ASLEEP):
                # Ask it for one token: without work, an engine that has stopped gives no sign that it goes on.
                body = msgspec.json.encode({"model": server.models[0], "prompt": "a", "max_tokens": 1})
                with suppress(Broken):
                    if (await ask(server, "/v1/completions", body)).status < 500:
                        server.works(self.now_s())

    # ---- statuses and time

    def heard(self, name: str, status: Status) -> None:
        member = self.members.by_name.get(name)
        now_s = self.now_s()
        if member is not None and status.incarnation == NO_INCARNATION:
            member.load.scraped(status.load.running, status.load.waiting, now_s, told=True)
        if member is None or not member.profile.publishes_status:  # a mirror's: it is not the engine, and has no load
            return
        if member.incarnation not in (None, status.incarnation):
            self.placement.restarted(member.load)
            member.server.learned = False
        member.incarnation = status.incarnation
        member.health.heard(now_s)
        member.load.reported(status.load, now_s)

    async def tick(self) -> None:
        """Run the clock: silence, slow starts, timeouts and the state of event streams."""
        expected_s = self.now_s()
        while True:
            now_s = self.now_s()
            # After a gap of our own, heartbeats and answers of that time are still to be read.
            gap_s = gap_s if (gap_s := now_s - expected_s) > LATE_S else 0.0
            self._stood_still_s += gap_s
            for server in list(self._servers.values()):
                try:
                    self._tick(server, now_s, gap_s)
                except Exception as error:  # the other replicas are not to suffer
                    self._stumbled(server, error)
                is_due = self._is_due(server, now_s) or self._is_outdated(server, now_s)
                if is_due and (due := self._due.get(server.name)) is not None:
                    due.set()
            self.requests.sweep(now_s, gap_s)
            self.suspects.migrate_stalled(now_s)
            self.requests.room()
            # At round times: the subscriber's tick comes at the same moment, and the process wakes once for both.
            pause_s = TICK_S - self.now_s() % TICK_S
            expected_s = now_s + pause_s
            await asyncio.sleep(pause_s)

    def _tick(self, server: Server, now_s: float, gap_s: float) -> None:
        was = server.unavailable
        if server.upstream.spoken:
            server.alive_s = now_s
        if not (server.in_flight or server.health.stalled):
            server.worked_s = now_s
        elif gap_s:
            server.worked_s = min(now_s, server.worked_s + gap_s)
        if server.upstream.spoken or not server.in_flight:
            server.upstream.spoken, server.quiet_since_s = False, now_s
        elif gap_s:
            server.quiet_since_s = min(now_s, server.quiet_since_s + gap_s)
        if gap_s:
            # The times of its attempts do so, too.
            server.silent_since_s, server.recovered_s = server.silent_since_s + gap_s, server.recovered_s + gap_s
            server.health.excuse(gap_s, now_s)
        server.health.tick(now_s)
        server.upstream.sweep(now_s)
        unavailable = server.unavailable
        if unavailable is not None and was is None:
            log.warning("%s: takes no requests: %s", server.name, unavailable)
            server.down_since_s = now_s
        elif unavailable is None and server.down_since_s is not None:
            log.warning("%s: takes requests again after %.1f s", server.name, now_s - server.down_since_s)
            server.down_since_s = None
        self.suspects.look(server, now_s)
        for member in list(server.members):
            member.load.tick(now_s)
            overclaims = None if member.feed is None else member.feed.overclaims()
            if overclaims is not None:  # None while the cache is read anew: the last value stays
                member.overclaims = overclaims
            trust = 0.0 if member.overclaims else member.accuracy.trust
            if trust != member.trust:
                member.trust = trust
                self.placement.trust(member.slot, trust)
            self.learning.set_block_size(member)


@contextmanager
def _going_on(name: str) -> Iterator[None]:
    """Log one replica's error, and keep the others going."""
    try:
        yield
    except BadSpec as error:
        log.error("%s: not added: %s", name, error)
    except Exception:  # whatever it is, it concerns this replica alone
        log.exception("%s: the router's own mistake", name)
