"""Keeps the router's knowledge of its replicas up to date: which exist, their models and their health.

Only tasks and timers; `learn`, `facts`, `health` and `load` interpret the answers. A `Server` has the task and the
health; each of its data-parallel ranks is a `Member`, which has a cache and a load.
"""

import asyncio
import logging
import math
import os
import random
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count

import msgspec

from events.native import Status
from router.core import Router
from router.log_lines import Report
from router.members.accuracy import Accuracy
from router.members.discovery.desired import Desired, difference
from router.members.facts import Facts, scraped_pools, scraped_queues
from router.members.fetch import Fetched, fetch
from router.members.health import Health, HealthConfig
from router.members.learn import learn
from router.members.members import Member, Server
from router.members.ranks import Rank
from router.members.spec import BadSpec, ReplicaSpec
from router.members.upstream import Broken, Upstream
from router.placement.eligibility import can_take
from router.placement.placement import APPROXIMATE
from router.prompts.tokenizer_probe import ProbeResult, probes, verdict
from router.prompts.tokenizers import Tokenizers
from router.proxy.attempt import refusal_code
from router.responses import FeedState
from router.status import isolation
from router.verification import Verification

log = logging.getLogger(__name__)

TICK_S = 0.1
LATE_S = 0.1  # of the clock itself; beyond that, the router stood still
USUAL_BLOCK_TOKENS = 16  # of an engine until its events name it
MOST_BACKOFF_S = 5.0  # a replica that comes up should not wait for long
SCRAPED = ("vllm", "sglang")
LEARN_AGAIN_S = 4.0  # so that an adapter is noticed within five
PROBE_S = 2.0  # for an answer
NATIVE_PROBE_S = 1.0  # our replicas answer whatever else they do
GIVEN_UP_S = 1.7  # without a heartbeat, which comes between an engine's steps: a long one is no death
QUIET_S = 0.3  # without a byte, while answers are awaited: is it frozen?
LOADING = "it is still loading its model"
UNANSWERED = 3  # checks in a row, of another engine, whose server may be slow while it works
# A replica's silence is its own only if others were heard meanwhile: else the network or this machine is silent.
LIVELY_S = 0.6  # since the last heartbeat of another one: two may be missed
RECOVERY_S = 2.0  # for streams to continue after a silence; connections may have died of it, or wait for long


class Upkeep:
    """Owns one task per server, for as long as its replica is desired."""

    def __init__(self, router: Router, tokenizers: Tokenizers) -> None:
        self.added: dict[str, ReplicaSpec] = {}  # by request, not by discovery
        self._router = router
        self._config = router.config
        self._tokenizers = tokenizers
        self._wanted: Desired = {}
        self._rng = random.Random()
        self._health_config = HealthConfig(
            faults_to_open=self._config.breaker_faults,
            most_backoff_s=MOST_BACKOFF_S,
            slow_start_s=self._config.slow_start_s,
            probe_interval_s=self._config.health_interval_s,
        )
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._due: dict[str, asyncio.Event] = {}  # set when a replica is to be checked
        self._leaving: set[asyncio.Task[None]] = set()
        self._stood_still_s = 0.0  # altogether
        self._verification = router.verification = Verification(
            self._post, router.placement, router.now_s, router.shows_prompts
        )
        self._processes = count(1)
        self._said_unsalted: set[str] = set()  # replicas that the log has warned of

    # ---- which replicas there are

    def apply(self, wanted: Desired) -> None:
        """Apply the result of discovery; replicas added by request stay, unless discovery names one the same."""
        self._wanted = wanted
        for name in wanted.keys() & self.added.keys():
            log.warning("%s: replacing the replica of this name that was added by request", name)
            del self.added[name]
        change = difference({name: server.spec for name, server in self._servers.items()}, wanted | self.added)
        try:
            others = {name: spec for name, spec in change.changed.items() if not self._is_told(spec)}
            for name in (*change.removed, *others):
                with _going_on(name):  # an error must not stop the others
                    self._remove(name)
            for spec in (*change.added.values(), *others.values()):
                with _going_on(spec.name):
                    self._add(spec)
        finally:
            if change:
                self._router.members.arrange()

    def _is_told(self, spec: ReplicaSpec) -> bool:
        """Apply a change of draining alone, which keeps the cache known; return False for any other change."""
        server = self._servers[spec.name]
        if msgspec.structs.replace(server.spec, draining=spec.draining) != spec:
            return False
        (server.health.drain if spec.draining else server.health.undrain)()
        server.spec = spec
        return True

    def add(self, spec: ReplicaSpec) -> None:
        """Add a replica by request; raise BadSpec if its name is taken or its key is not available."""
        if self._router.members.server(spec.name) is not None:
            raise BadSpec(f"a replica named {spec.name!r} is there already; remove it first, or choose another name")
        spec.api_key(os.environ)
        self.added[spec.name] = spec
        self.apply(self._wanted)
        if spec.name not in self._servers:
            self.added.pop(spec.name, None)
            raise BadSpec(f"{spec.name!r} could not be added; the router's log says why")

    def remove(self, name: str) -> None:
        """Remove a replica added by request; raise BadSpec if discovery names it, since it would be back at once."""
        if name in self._wanted:
            raise BadSpec(f"{name!r} is named by the router's discovery; remove it there, or drain it here")
        del self.added[name]
        self.apply(self._wanted)

    @property
    def _servers(self) -> dict[str, Server]:
        return self._router.members.servers

    def _add(self, spec: ReplicaSpec) -> None:
        router, config = self._router, self._config
        # A request chooses the URL, and must not get the router's key sent there.
        key = spec.api_key(os.environ, None if spec.name in self.added else config.replica_api_key)
        target = spec.target
        tls = ssl.create_default_context() if target.tls else None
        upstream = Upstream(target, config.connect_timeout_s, tls)
        health = Health(self._rng, router.now_s(), self._health_config)
        server = Server(spec, upstream, health)
        if key is not None:
            server.key_line = b"authorization: Bearer %b\r\n" % key.encode()
        if spec.draining:
            health.drain()
        self._arrange_ranks(server, (Rank(spec),))
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
        self._forget_process(server)
        for member in list(server.members):
            self._drop(member)
        self._said_unsalted.discard(name)
        log.info("%s: removed", name)

    def _arrange_ranks(self, server: Server, ranks: tuple[Rank, ...]) -> None:
        """Let the server have one member for each rank; those that it has already keep all that is known of them."""
        names = {rank.spec.name for rank in ranks}
        for name in names - server.names:
            if name in self._router.members.by_name:
                raise BadSpec(f"two replicas are named {name!r}, one as a rank of {server.name!r}; rename one")
        for member in list(server.members):
            if member.name not in names:
                self._drop(member)
        for rank in ranks:
            if rank.spec.name not in server.names:
                load = self._router.placement.add(rank.spec.name, limit=self._config.replica_limit)
                member = Member(rank.spec, load, server, Accuracy(self._config.accuracy_objective))
                self._router.members.by_name[member.name] = member
                server.join(member)

    def _drop(self, member: Member) -> None:
        """Forget one cache; its running requests may end."""
        member.server.part(member)
        del self._router.members.by_name[member.name]
        self._router.feeds.leave(member.name)
        self._router.placement.remove(member.load)

    async def _leave(self, server: Server) -> None:
        reason = "it was removed, and its time to drain is over"
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.drain_timeout_s):
                reason = await self._emptied(server) or reason
        with _going_on(server.name):
            server.upstream.break_all(reason)
        server.upstream.close()

    async def _emptied(self, server: Server) -> str | None:
        """Wait until the replica's requests have ended; return the reason if it is lost, found by probes."""
        upstream = server.upstream
        quiet_since_s = self._router.now_s()
        while upstream.sendings:
            await asyncio.sleep(TICK_S)
            now_s = self._router.now_s()
            if upstream.spoken or not server.native:
                upstream.spoken, quiet_since_s = False, now_s
            elif now_s - quiet_since_s > GIVEN_UP_S:
                try:
                    await self._ask(server, "/ready", timeout_s=NATIVE_PROBE_S)
                except Broken as broken:
                    if broken.silent or not broken.refused:  # one that ends refuses connections, and still answers
                        return str(broken)
                quiet_since_s = self._router.now_s()
        return None

    async def close(self) -> None:
        tasks = [*self._tasks.values(), *self._leaving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._verification.close()
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
                now_s = self._router.now_s()
                if self._is_due(server, now_s):  # it may have been looked at meanwhile
                    server.health.probing(now_s)
                    unanswered = 0 if await self._check(server) else unanswered + 1
                    self._doubt(server, unanswered)
                elif self._is_outdated(server, now_s):
                    with suppress(Broken):  # for the health checks to judge
                        await self.learn_again(server)

    def _is_due(self, server: Server, now_s: float) -> bool:
        return server.health.probe_due(now_s) or self._is_quiet(server, now_s)

    def _is_outdated(self, server: Server, now_s: float) -> bool:
        """Return whether to ask another engine again: it loads and unloads adapters without a word."""
        asks = self._config.health_interval_s > 0 and server.learned and not server.native
        return asks and now_s - server.learned_s >= LEARN_AGAIN_S and server.health.breaker == "closed"

    async def learn_again(self, server: Server) -> None:
        """Ask a replica again what it serves; raise Broken if it does not answer."""
        server.learned_s = self._router.now_s()
        try:
            await self._learn(server)
        except BadSpec as error:
            self._failed(server, str(error))

    async def _check(self, server: Server) -> bool:
        """Check the replica once; return whether it answered at all."""
        stood_still_s = self._stood_still_s
        try:
            if not server.learned or server.health.silent:  # it may have restarted unseen
                await self._learn(server)
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

    def _doubt(self, server: Server, unanswered: int) -> None:
        """Suspect another engine that leaves several checks in a row unanswered, and says nothing else."""
        quiet = not server.upstream.spoken and self._router.now_s() - server.quiet_since_s > PROBE_S + QUIET_S
        if unanswered >= UNANSWERED and not server.native and quiet:
            self._suspect(server, f"it has not answered {unanswered} health checks in a row", server.quiet_since_s)

    @staticmethod
    def _stumbled(server: Server, error: Exception) -> None:
        """Log a mistake of the router's own, once for as long as it stays the same."""
        if server.trouble != repr(error):
            log.error("%s: the router's own mistake", server.name, exc_info=error)
        server.trouble = repr(error)

    def _failed(self, server: Server, reason: str, *, silent: bool = False) -> None:
        server.learned = False  # the next answer may come from another process
        if server.trouble != reason:  # logged once, not every half second
            log.warning("%s: %s", server.name, reason)
        server.trouble = reason
        server.faults += 1
        now_s = self._router.now_s()
        server.health.probed(False, reason, now_s, silent=silent)
        if self._is_quiet(server, now_s):
            server.health.fault(reason, now_s, refused=True, silent=silent)
            if silent:
                self._suspect(server, reason, server.quiet_since_s)
            else:
                server.upstream.break_all(reason)

    # ---- silence

    def _suspect(self, server: Server, reason: str, since_s: float) -> None:
        """Suspect a replica of being frozen or cut off; its requests then move to others where possible."""
        if not server.suspicion:
            now_s = self._router.now_s()
            log.warning("%s: suspected: %s", server.name, reason)
            server.silent_since_s, server.suspected_s = since_s, now_s
            for other in self._servers.values():  # replicas without a heartbeat
                if other.health.heard_age_s(now_s) is None:
                    other.health.probe_soon(now_s)
        server.suspicion = reason

    def _recovered(self, server: Server, now_s: float) -> None:
        log.info("%s: heard again after %.1f s", server.name, now_s - server.silent_since_s)
        server.suspicion, server.recovered_s = "", now_s
        server.upstream.drop_idle()

    def _look_for_silence(self, server: Server, now_s: float) -> None:
        health = server.health
        if health.silent_s > GIVEN_UP_S:
            self._suspect(server, "no heartbeat comes from it any more", now_s - health.silent_s)
        elif server.suspicion and now_s - server.alive_s < TICK_S + LATE_S:
            self._recovered(server, now_s)

    def _move_unheard(self, now_s: float) -> None:
        """Take requests away from suspected replicas, and restart those stuck at replicas that are heard again."""
        heard_again = [one for one in self._servers.values() if now_s - one.recovered_s > RECOVERY_S]
        to = {server: server.members for server in heard_again if not server.suspicion}
        suspected = [server for server in self._servers.values() if server.suspicion]
        if suspected:
            lively = self._lively_by_model(max(server.suspected_s for server in suspected))
            to |= {one: [other for name in one.models for other in lively.get(name, ())] for one in suspected}
        if any(to.values()):
            self._router.move_unheard(to)
        for server in heard_again:
            if server.suspicion or not self._router.is_stuck(server):
                server.recovered_s = math.inf

    def _lively_by_model(self, since_s: float) -> dict[str, list[Member]]:
        """Replicas with room, by model, that were heard just now or have sent something since `since_s`."""
        by_model: dict[str, list[Member]] = {}
        for server in self._servers.values():
            if not server.suspicion and self._is_lively(server, since_s):
                able = [member for member in server.members if can_take(member.candidate)]
                for name in server.models:
                    by_model.setdefault(name, []).extend(able)
        return by_model

    def _is_lively(self, server: Server, since_s: float) -> bool:
        heard_age_s = server.health.heard_age_s(self._router.now_s())
        return server.alive_s > since_s if heard_age_s is None else heard_age_s < LIVELY_S

    @staticmethod
    def _is_quiet(server: Server, now_s: float) -> bool:
        """Return whether a native replica owes answers and sends none: its server may be frozen and its engine not."""
        return server.native and not server.upstream.spoken and now_s - server.quiet_since_s > QUIET_S

    async def _learn(self, server: Server) -> None:
        facts = await learn(server.spec, partial(self._ask, server), server.facts if server.learned else None)
        server.learned_s = self._router.now_s()
        if self._servers.get(server.name) is not server:  # it was removed meanwhile
            return
        if facts.spec.model is None or (server.learned and facts == server.facts):
            return
        if facts.loading and facts.models == server.models:
            raise BadSpec(LOADING)
        self._tokenizers.of(facts.spec.model, tokenizer=facts.tokenizer, native=facts.native, engine=facts.spec.engine)
        if not server.learned or facts.models[:1] != server.models[:1]:
            self._forget_process(server)
            server.verified, server.renders = None, True
            server.process = f"{server.name} #{next(self._processes)}"
        self._take_over(server, facts)
        self._router.members.arrange()
        if facts.loading:
            raise BadSpec(LOADING)

    def _take_over(self, server: Server, facts: Facts) -> None:
        """Make its members those of its ranks, described as the replica does."""
        self._arrange_ranks(server, facts.ranks)
        known = {member.why_no_events for member in server.members}
        for why in dict.fromkeys(rank.why_no_events for rank in facts.ranks):
            if why and why not in known:
                log.warning("%s: what it has cached can only be guessed: %s", server.name, why)
        server.facts, server.learned = facts, True
        ranks = {rank.spec.name: rank for rank in facts.ranks}
        for member in server.members:
            member.describe(facts, ranks[member.name])
            if not facts.loading:
                self._follow(member, facts.total_blocks)

    def _follow(self, member: Member, total_blocks: int | None) -> None:
        source = member.spec.source(self._router.config.curve_files)
        changed = source != member.source
        if changed:  # if it is the same, the feed itself notices a restart
            self._router.feeds.leave(member.name)
            member.source, member.overclaims = None, False
            if source is not None:
                try:
                    self._router.feeds.follow(member.name, member.slot, source)
                except ValueError as error:
                    raise BadSpec(str(error)) from error
            member.source = source
        if total_blocks is not None:
            self._router.feeds.limit(member.name, total_blocks)
        if source is None or member.spec.block_size is not None or changed:
            member.block_size = APPROXIMATE if source is None else member.spec.block_size or USUAL_BLOCK_TOKENS

    def _warn_of_salts(self, server: Server) -> None:
        if server.name not in self._said_unsalted and isolation(self._router, server.members[0]) == "unknown":
            self._said_unsalted.add(server.name)
            log.warning(
                "%s: API keys are in use, but its engine (%s) may ignore the salts that separate their caches",
                server.name,
                server.members[0].spec.engine,
            )

    async def _probe(self, server: Server) -> None:
        path, timeout_s = ("/ready", NATIVE_PROBE_S) if server.native else ("/health", PROBE_S)
        answer = await self._ask(server, path, timeout_s=timeout_s)
        now_s = self._router.now_s()
        if answer.status == 200:
            if server.verified is None:
                await self._verify(server)
            self._warn_of_salts(server)
            server.trouble = ""
            server.health.probed(True, "", now_s)
        elif answer.status == 503 and refusal_code(answer.body) == "draining":
            server.health.rests("it drains")
        else:
            self._failed(server, f"it answers its health check with status {answer.status}")
        if server.members[0].spec.engine in SCRAPED:
            scraped = await self._ask(server, "/metrics")
            if scraped.status == 200:
                self._scraped(server, scraped.body, now_s)

    def _scraped(self, server: Server, metrics: bytes, now_s: float) -> None:
        queues, pools = scraped_queues(metrics), scraped_pools(metrics)
        speculates = b"\nvllm:spec_decode_num_drafts" in metrics
        for member in server.members:
            self._router.feeds.speculates(member.name, speculates)
            if (queue := queues.get(member.rank)) is not None:
                member.load.scraped(*queue, now_s)
            pool, size = pools.get(member.rank), member.block_size
            if pool is not None and size:  # its events may name smaller blocks than its pool has
                smaller = max(1, pool.block_tokens // size)
                cacheable = pool.blocks - (member.spec.engine == "vllm")  # which never uses one of them
                self._router.feeds.limit(member.name, pool.blocks * smaller, cacheable * smaller)

    async def _verify(self, server: Server) -> None:
        """Compare our tokenizer with the replica's: wrong tokens would be worse than none."""
        tokens = self._tokenizers.of(server.models[0])
        if tokens.prompts is None or tokens.why_not is not None:
            server.verified = "there is none here"
            return
        asked = probes(server.models[0], tokens.prompts, tokens.engine)
        answers = [await self._ask(server, "/tokenize", probe.body) for probe in asked]
        answered = [(answer.status, answer.body) for answer in answers]
        texts = [i for i, probe in enumerate(asked) if probe.shape is None or "prompt" in probe.what]
        found = verdict([asked[i] for i in texts], [answered[i] for i in texts])
        if found.verified and tokens.shapes is not None:
            self._verification.probed(server, tokens, asked, answered)
            found = verdict(asked, answered)
            found = ProbeResult(found.verified is not None or None, found.why)
        server.verified = found.why
        if found.verified is False:
            tokens.go_approximate(f"the tokenizer here is not that of {server.name}: {found.why}")
        elif found.verified is None:
            log.warning("%s: cannot tell if its tokenizer equals the router's: %s", server.name, found.why)
            if tokens.shapes is not None:
                tokens.shapes.unanswered(f"not verified: {found.why}", self._router.now_s())

    def _forget_process(self, server: Server) -> None:
        for name in server.models:
            model = self._router.members.models.get(name)
            if model is not None and model.tokens.shapes is not None:
                model.tokens.shapes.forget(server.process)

    async def _post(self, server: Server, path: str, body: bytes, timeout_s: float) -> Fetched:
        return await self._ask(server, path, body, timeout_s)

    async def _ask(self, server: Server, path: str, body: bytes | None = None, timeout_s: float = PROBE_S) -> Fetched:
        return await fetch(server.upstream, path, body=body, lines=server.key_line, timeout_s=timeout_s)

    # ---- what comes by itself

    def heard(self, name: str, status: Status) -> None:
        """Process a native replica's heartbeat."""
        member = self._router.members.by_name.get(name)
        if member is None:
            return
        now_s = self._router.now_s()
        if member.incarnation not in (None, status.incarnation):
            self._router.placement.restarted(member.load)
            member.server.learned = False
        member.incarnation = status.incarnation
        member.health.heard(now_s)
        member.load.reported(status.load, now_s)
        member.report = Report(status.ts, now_s, next(self._router.order))

    async def tick(self) -> None:
        """Run the clock: silence, slow starts, timeouts and the state of event streams."""
        expected_s = self._router.now_s()
        while True:
            now_s = self._router.now_s()
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
            self._router.sweep(now_s, gap_s)
            self._move_unheard(now_s)
            if self._router.waiting:
                self._router.room()
            expected_s = now_s + TICK_S
            await asyncio.sleep(TICK_S)

    def _tick(self, server: Server, now_s: float, gap_s: float) -> None:
        was = server.unavailable
        if server.upstream.spoken:
            server.alive_s = now_s
        if server.upstream.spoken or not server.in_flight:
            server.upstream.spoken, server.quiet_since_s = False, now_s
        elif gap_s:
            server.quiet_since_s = min(now_s, server.quiet_since_s + gap_s)
        if gap_s:
            # As with the times of its attempts.
            server.silent_since_s, server.recovered_s = server.silent_since_s + gap_s, server.recovered_s + gap_s
            server.health.excuse(gap_s, now_s)
        server.health.tick(now_s)
        server.upstream.sweep(now_s)
        unavailable = server.unavailable
        if unavailable is not None and was is None:
            log.warning("%s: takes no requests: %s", server.name, unavailable)
        elif unavailable is None and was is not None:
            log.info("%s: takes requests again", server.name)
        self._look_for_silence(server, now_s)
        for member in list(server.members):
            member.load.tick(now_s)
            self._look_at_cache(member)

    def _look_at_cache(self, member: Member) -> None:
        state = self._router.feeds.state(member.name)
        overclaims = self._router.feeds.overclaims(member.name)
        if overclaims is not None:  # None while the cache is read anew: the last value stays
            member.overclaims = overclaims
        self._router.trust(member, 0.0 if member.overclaims else member.accuracy.trust)
        if state is not None:
            self._set_block_size(member, state)

    def sized(self, name: str) -> None:
        """Take a replica's block size from its events at once: keys of another size would find nothing there."""
        member, state = self._router.members.by_name.get(name), self._router.feeds.state(name)
        if member is not None and state is not None:
            self._set_block_size(member, state)

    def _set_block_size(self, member: Member, state: FeedState) -> None:
        block_size = member.block_size
        if state.unreached:
            block_size = APPROXIMATE
        elif state.block_sizes and block_size not in state.block_sizes:
            block_size = min(state.block_sizes)
        elif block_size == APPROXIMATE:
            block_size = member.spec.block_size or USUAL_BLOCK_TOKENS
        if block_size != member.block_size:
            if APPROXIMATE in (block_size, member.block_size):
                told = f"what it has cached is guessed: {state.reason}" if state.unreached else "its events are reached"
                log.warning("%s: %s", member.name, told)
            member.block_size = block_size
            self._router.members.arrange()


@contextmanager
def _going_on(name: str) -> Iterator[None]:
    """Log one replica's error, and keep the others going."""
    try:
        yield
    except BadSpec as error:
        log.error("%s: not added: %s", name, error)
    except Exception:  # whatever it is, it concerns this replica alone
        log.exception("%s: the router's own mistake", name)
