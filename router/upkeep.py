"""Keeps the router's knowledge of its replicas up to date: which exist, their models and their health.

Only tasks and timers; `facts`, `health` and `load` interpret the answers.
"""

import asyncio
import logging
import math
import os
import random
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec

from events.native import Status
from events.source import Source
from router.core import Router
from router.log_lines import Report
from router.members.accuracy import Accuracy
from router.members.discovery.desired import Desired, difference
from router.members.facts import Facts, foreign_facts, native_facts, scraped_pool, scraped_queue
from router.members.fetch import Fetched, fetch
from router.members.health import Health, HealthConfig
from router.members.members import Member
from router.members.spec import BadSpec, ReplicaSpec
from router.members.upstream import Broken, Upstream
from router.placement.eligibility import can_take
from router.placement.placement import APPROXIMATE
from router.prompts.tokenizer_probe import probes, verdict
from router.prompts.tokenizers import Tokenizers
from router.proxy.attempt import refusal_code
from router.status import isolation

log = logging.getLogger(__name__)

TICK_S = 0.1
LATE_S = 0.1  # of the clock itself; beyond that, the router stood still
USUAL_BLOCK_TOKENS = 16  # of an engine until its events name it
MOST_BACKOFF_S = 5.0  # a replica that comes up should not wait for long
SCRAPED = ("vllm", "sglang")
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
    """Owns one task per replica, for as long as the replica is desired."""

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
        self._said_unsalted: set[str] = set()  # replicas that the log has warned of

    # ---- which replicas there are

    def apply(self, wanted: Desired) -> None:
        """Apply the result of discovery; replicas added by request stay, unless discovery names one the same."""
        self._wanted = wanted
        for name in wanted.keys() & self.added.keys():
            log.warning("%s: replacing the replica of this name that was added by request", name)
            del self.added[name]
        change = difference(
            {name: member.spec_as_wanted for name, member in self._members.items()}, wanted | self.added
        )
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
        member = self._members[spec.name]
        if msgspec.structs.replace(member.spec_as_wanted, draining=spec.draining) != spec:
            return False
        (member.health.drain if spec.draining else member.health.undrain)()
        member.spec_as_wanted = spec
        return True

    def add(self, spec: ReplicaSpec) -> None:
        """Add a replica by request; raise BadSpec if its name is taken or its key is not available."""
        if spec.name in self._members:
            raise BadSpec(f"a replica named {spec.name!r} is there already; remove it first, or choose another name")
        spec.api_key(os.environ)
        self.added[spec.name] = spec
        self.apply(self._wanted)
        if spec.name not in self._members:
            self.added.pop(spec.name, None)
            raise BadSpec(f"{spec.name!r} could not be added; the router's log says why")

    def remove(self, name: str) -> None:
        """Remove a replica added by request; raise BadSpec if discovery names it, since it would be back at once."""
        if name in self._wanted:
            raise BadSpec(f"{name!r} is named by the router's discovery; remove it there, or drain it here")
        del self.added[name]
        self.apply(self._wanted)

    @property
    def _members(self) -> dict[str, Member]:
        return self._router.members.by_name

    def _add(self, spec: ReplicaSpec) -> None:
        router, config = self._router, self._config
        # A request chooses the URL, and must not get the router's key sent there.
        key = spec.api_key(os.environ, None if spec.name in self.added else config.replica_api_key)
        target = spec.target
        tls = ssl.create_default_context() if target.tls else None
        upstream = Upstream(target, config.connect_timeout_s, tls)
        load = router.placement.add(spec.name, limit=config.replica_limit)
        health = Health(load.candidate, self._rng, router.now_s(), self._health_config)
        member = Member(spec, load, health, upstream, Accuracy(config.accuracy_objective))
        if key is not None:
            member.key_line = b"authorization: Bearer %b\r\n" % key.encode()
        if spec.draining:
            health.drain()
        self._members[spec.name] = member
        due = self._due[spec.name] = asyncio.Event()
        due.set()
        self._tasks[spec.name] = asyncio.create_task(self._keep(member, due))
        log.info("%s: added, %s", spec.name, spec.url)

    def _remove(self, name: str) -> None:
        """Remove a replica: it gets no new requests, and running ones may end."""
        member = self._members.pop(name)
        self._tasks.pop(name).cancel()
        del self._due[name]
        leaving = asyncio.create_task(self._leave(member))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)
        self._router.feeds.leave(name)
        self._router.placement.remove(member.load)
        self._said_unsalted.discard(name)
        log.info("%s: removed", name)

    async def _leave(self, member: Member) -> None:
        reason = "it was removed, and its time to drain is over"
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.drain_timeout_s):
                reason = await self._emptied(member) or reason
        with _going_on(member.name):
            member.upstream.break_all(reason)
        member.upstream.close()

    async def _emptied(self, member: Member) -> str | None:
        """Wait until the replica's requests have ended; return the reason if it is lost, found by probes."""
        upstream = member.upstream
        quiet_since_s = self._router.now_s()
        while upstream.sendings:
            await asyncio.sleep(TICK_S)
            now_s = self._router.now_s()
            if upstream.spoken or not member.native:
                upstream.spoken, quiet_since_s = False, now_s
            elif now_s - quiet_since_s > GIVEN_UP_S:
                try:
                    await self._ask(member, "/ready", timeout_s=NATIVE_PROBE_S)
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
        for member in self._members.values():
            member.upstream.close()

    # ---- one replica

    async def _keep(self, member: Member, due: asyncio.Event) -> None:
        """Find out the replica's engine and model, then check its health repeatedly."""
        unanswered = 0  # checks in a row
        while True:
            await due.wait()
            due.clear()
            with _going_on(member.name):
                now_s = self._router.now_s()
                if self._is_due(member, now_s):  # it may have been looked at meanwhile
                    member.health.probing(now_s)
                    unanswered = 0 if await self._check(member) else unanswered + 1
                    self._doubt(member, unanswered)

    def _is_due(self, member: Member, now_s: float) -> bool:
        return member.health.probe_due(now_s) or self._is_quiet(member, now_s)

    async def _check(self, member: Member) -> bool:
        """Check the replica once; return whether it answered at all."""
        stood_still_s = self._stood_still_s
        try:
            if not member.learned or member.health.silent:  # it may have restarted unseen
                await self._learn(member)
            await self._probe(member)
        except Broken as error:
            if error.ours:  # this says nothing about the replica
                log.error("%s: cannot check its health: %s", member.name, error)
                return True
            if error.silent and self._stood_still_s - stood_still_s > NATIVE_PROBE_S / 2:
                return True  # the router itself stood still
            self._failed(member, str(error), silent=error.silent)
            return False
        except BadSpec as error:
            self._failed(member, str(error))
        except Exception as error:  # a mistake of our own: ask it again
            self._stumbled(member, error)
            self._failed(member, repr(error))
        return True

    def _doubt(self, member: Member, unanswered: int) -> None:
        """Suspect another engine that leaves several checks in a row unanswered, and says nothing else."""
        quiet = not member.upstream.spoken and self._router.now_s() - member.quiet_since_s > PROBE_S + QUIET_S
        if unanswered >= UNANSWERED and not member.native and quiet:
            self._suspect(member, f"it has not answered {unanswered} health checks in a row", member.quiet_since_s)

    @staticmethod
    def _stumbled(member: Member, error: Exception) -> None:
        """Log a mistake of the router's own, once for as long as it stays the same."""
        if member.trouble != repr(error):
            log.error("%s: the router's own mistake", member.name, exc_info=error)
        member.trouble = repr(error)

    def _failed(self, member: Member, reason: str, *, silent: bool = False) -> None:
        member.learned = False  # the next answer may come from another process
        if member.trouble != reason:  # logged once, not every half second
            log.warning("%s: %s", member.name, reason)
        member.trouble = reason
        member.faults += 1
        now_s = self._router.now_s()
        member.health.probed(False, reason, now_s, silent=silent)
        if self._is_quiet(member, now_s):
            member.health.fault(reason, now_s, refused=True, silent=silent)
            if silent:
                self._suspect(member, reason, member.quiet_since_s)
            else:
                member.upstream.break_all(reason)

    # ---- silence

    def _suspect(self, member: Member, reason: str, since_s: float) -> None:
        """Suspect a replica of being frozen or cut off; its requests then move to others where possible."""
        if not member.suspicion:
            now_s = self._router.now_s()
            log.warning("%s: suspected: %s", member.name, reason)
            member.silent_since_s, member.suspected_s = since_s, now_s
            for other in self._members.values():  # replicas without a heartbeat
                if other.health.heard_age_s(now_s) is None:
                    other.health.probe_soon(now_s)
        member.suspicion = reason

    def _recovered(self, member: Member, now_s: float) -> None:
        log.info("%s: heard again after %.1f s", member.name, now_s - member.silent_since_s)
        member.suspicion, member.recovered_s = "", now_s
        member.upstream.drop_idle()

    def _look_for_silence(self, member: Member, now_s: float) -> None:
        health = member.health
        if health.silent_s > GIVEN_UP_S:
            self._suspect(member, "no heartbeat comes from it any more", now_s - health.silent_s)
        elif member.suspicion and now_s - member.alive_s < TICK_S + LATE_S:
            self._recovered(member, now_s)

    def _move_unheard(self, now_s: float) -> None:
        """Take requests away from suspected replicas, and restart those stuck at replicas that are heard again."""
        heard_again = [one for one in self._members.values() if now_s - one.recovered_s > RECOVERY_S]
        to = {member: [member] for member in heard_again if not member.suspicion}
        suspected = [member for member in self._members.values() if member.suspicion]
        if suspected:
            lively = self._lively_by_model(max(member.suspected_s for member in suspected))
            to |= {one: [other for name in one.models for other in lively.get(name, ())] for one in suspected}
        if any(to.values()):
            self._router.move_unheard(to)
        for member in heard_again:
            if member.suspicion or not self._router.is_stuck(member):
                member.recovered_s = math.inf

    def _lively_by_model(self, since_s: float) -> dict[str, list[Member]]:
        """Replicas with room, by model, that were heard just now or have sent something since `since_s`."""
        by_model: dict[str, list[Member]] = {}
        for member in self._members.values():
            if can_take(member.candidate) and not member.suspicion and self._is_lively(member, since_s):
                for name in member.models:
                    by_model.setdefault(name, []).append(member)
        return by_model

    def _is_lively(self, member: Member, since_s: float) -> bool:
        heard_age_s = member.health.heard_age_s(self._router.now_s())
        return member.alive_s > since_s if heard_age_s is None else heard_age_s < LIVELY_S

    @staticmethod
    def _is_quiet(member: Member, now_s: float) -> bool:
        """Return whether a native replica owes answers and sends none: its server may be frozen and its engine not."""
        return member.native and not member.upstream.spoken and now_s - member.quiet_since_s > QUIET_S

    async def _learn(self, member: Member) -> None:
        facts = await self._facts(member)
        if facts.spec.model is None:
            return
        if member.learned and not facts.loading and self._source(facts) == member.source:
            return  # it was silent, but has not changed
        if facts.loading and facts.models == member.models:
            raise BadSpec(LOADING)
        self._tokenizers.of(facts.spec.model, tokenizer=facts.tokenizer, native=facts.native)
        member.verified = None
        member.describe(facts)
        if not facts.loading:
            self._follow(member, facts)
        self._router.members.arrange()
        if facts.loading:
            raise BadSpec(LOADING)

    def _warn_of_salts(self, member: Member) -> None:
        if member.name not in self._said_unsalted and isolation(self._router, member) == "unknown":
            self._said_unsalted.add(member.name)
            log.warning(
                "%s: API keys are in use, but its engine (%s) may ignore the salts that separate their caches",
                member.name,
                member.spec.engine,
            )

    async def _facts(self, member: Member) -> Facts:
        spec = member.spec_as_wanted
        if spec.engine in ("auto", "warmroute"):
            answer = await self._ask(member, "/load")
            facts = native_facts(spec, answer.body) if answer.status == 200 else None
            if facts is not None:
                return facts
            if spec.engine == "warmroute":
                raise BadSpec(f"{spec.name} does not answer /load as a replica of ours (status {answer.status})")
        answer = await self._ask(member, "/v1/models")
        if answer.status != 200:
            raise BadSpec(f"{spec.name} answers /v1/models with status {answer.status}")
        return foreign_facts(spec, answer.body)

    def _source(self, facts: Facts) -> Source | None:
        return facts.spec.source(self._router.config.curve_files)

    def _follow(self, member: Member, facts: Facts) -> None:
        source = self._source(facts)
        if source != member.source:  # if it is the same, the feed itself notices a restart
            self._router.feeds.leave(member.name)
            member.source, member.overclaims = None, False
            if source is not None:
                try:
                    self._router.feeds.follow(member.name, member.slot, source)
                except ValueError as error:
                    raise BadSpec(str(error)) from error
            member.source = source
        if facts.total_blocks is not None:
            self._router.feeds.limit(member.name, facts.total_blocks)
        member.block_size = APPROXIMATE if source is None else facts.spec.block_size or USUAL_BLOCK_TOKENS

    async def _probe(self, member: Member) -> None:
        path, timeout_s = ("/ready", NATIVE_PROBE_S) if member.native else ("/health", PROBE_S)
        answer = await self._ask(member, path, timeout_s=timeout_s)
        now_s = self._router.now_s()
        if answer.status == 200:
            if member.verified is None:
                await self._verify(member)
            self._warn_of_salts(member)
            member.trouble = ""
            member.health.probed(True, "", now_s)
        elif answer.status == 503 and refusal_code(answer.body) == "draining":
            member.health.rests("it drains")
        else:
            self._failed(member, f"it answers its health check with status {answer.status}")
        if member.spec.engine in SCRAPED:
            scraped = await self._ask(member, "/metrics")
            if scraped.status == 200:
                self._scraped(member, scraped.body, now_s)

    def _scraped(self, member: Member, metrics: bytes, now_s: float) -> None:
        queue = scraped_queue(metrics)
        if queue is not None:
            member.load.scraped(*queue, now_s)
        self._router.feeds.speculates(member.name, b"\nvllm:spec_decode_num_drafts" in metrics)
        pool, size = scraped_pool(metrics), member.block_size
        if pool is not None and size:  # its events may name smaller blocks than its pool has
            smaller = max(1, pool.block_tokens // size)
            cacheable = pool.blocks - (member.spec.engine == "vllm")  # which never uses one of them
            self._router.feeds.limit(member.name, pool.blocks * smaller, cacheable * smaller)

    async def _verify(self, member: Member) -> None:
        """Compare our tokenizer with the replica's: wrong tokens would be worse than none."""
        tokens = self._tokenizers.of(member.models[0])
        if tokens.prompts is None or tokens.why_not is not None:
            member.verified = "there is none here"
            return
        asked = probes(member.models[0], tokens.prompts)
        answers = [await self._ask(member, "/tokenize", probe.body) for probe in asked]
        found = verdict(asked, [(answer.status, answer.body) for answer in answers])
        member.verified = found.why
        if found.verified is False:
            tokens.go_approximate(f"the tokenizer here is not that of {member.name}: {found.why}")
        elif found.verified is None:
            log.warning("%s: cannot tell if its tokenizer equals the router's: %s", member.name, found.why)

    async def _ask(self, member: Member, path: str, body: bytes | None = None, timeout_s: float = PROBE_S) -> Fetched:
        return await fetch(member.upstream, path, body=body, lines=member.key_line, timeout_s=timeout_s)

    # ---- what comes by itself

    def heard(self, name: str, status: Status) -> None:
        """Process a native replica's heartbeat."""
        member = self._members.get(name)
        if member is None:
            return
        now_s = self._router.now_s()
        if member.incarnation not in (None, status.incarnation):
            self._router.placement.restarted(member.load)
            member.learned = False
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
            for member in list(self._members.values()):
                try:
                    self._tick(member, now_s, gap_s)
                except Exception as error:  # the other replicas are not to suffer
                    self._stumbled(member, error)
                if self._is_due(member, now_s) and (due := self._due.get(member.name)) is not None:
                    due.set()
            self._router.sweep(now_s, gap_s)
            self._move_unheard(now_s)
            if self._router.waiting:
                self._router.room()
            expected_s = now_s + TICK_S
            await asyncio.sleep(TICK_S)

    def _tick(self, member: Member, now_s: float, gap_s: float) -> None:
        was = member.candidate.unavailable
        if member.upstream.spoken:
            member.alive_s = now_s
        if member.upstream.spoken or not member.candidate.in_flight:
            member.upstream.spoken, member.quiet_since_s = False, now_s
        elif gap_s:
            member.quiet_since_s = min(now_s, member.quiet_since_s + gap_s)
        if gap_s:
            # As with the times of its attempts.
            member.silent_since_s, member.recovered_s = member.silent_since_s + gap_s, member.recovered_s + gap_s
            member.health.excuse(gap_s, now_s)
        member.health.tick(now_s)
        member.load.tick(now_s)
        member.upstream.sweep(now_s)
        unavailable = member.candidate.unavailable
        if unavailable is not None and was is None:
            log.warning("%s: takes no requests: %s", member.name, unavailable)
        elif unavailable is None and was is not None:
            log.info("%s: takes requests again", member.name)
        self._look_for_silence(member, now_s)
        state = self._router.feeds.state(member.name)
        overclaims = self._router.feeds.overclaims(member.name)
        if overclaims is not None:  # None while the cache is read anew: the last value stays
            member.overclaims = overclaims
        self._router.trust(member, 0.0 if member.overclaims else member.accuracy.trust)
        if state is not None and state.block_sizes and member.block_size not in state.block_sizes:
            member.block_size = min(state.block_sizes)
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
