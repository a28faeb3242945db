"""The promises of a world: those that hold while it lasts, and those that hold when all is over."""

import json
import math
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any, cast

from api.openai.requests import ChatRequest, read
from events.blocks import pack_tokens
from router.members.spec import ReplicaSpec
from router.process.front import Front
from router.proxy.flow import OVER
from router.proxy.retries import MAX_LOST
from router.records.access_log import Line
from router.tenants.keys import Key
from router.tenants.limits import DAY_S, limits_of
from router.tenants.usage import Counts
from tests.router.scripted import Served, chat
from tests.world.client import LEFT, LIMITED, Asked, without_own
from tests.world.edited import EditedFile
from tests.world.network import Host
from tests.world.replica import (
    KNOWN_S,
    PROMPTS,
    Answering,
    ScriptedReplica,
    effect_of,
    stream_of,
    tokens_of,
    whole_of,
)
from tests.world.sglang import SglangAnswering
from tests.world.vllm import VllmAnswering, VllmReplica

WAITS_S = 45.0  # at most, from one byte to the next: for room, and for three replicas that say nothing
QUEUE_TIMEOUT_S, FIRST_TOKEN_TIMEOUT_S = 20.0, 10.0  # as the router is told
NO_REPLICA = "refused with 503 no_replica"
PAUSE_S = 0.45  # before a third replica is asked after two were lost
NO_ROOM = "429 queue_full"
UNKNOWN = "refused with 401 invalid_api_key"
ADMITTED_S = 1.5  # after it was asked: the slowest connection has brought it
SETTLED_S = 7.0  # after a trouble, or after something that was stored: the router has heard of it, and all is known
AT_A_RESTART = "refused with 503 draining", "its connection ended"  # the router's
BEGINS_S = 3.0  # until a router knows its replicas
PASSED_ON = "refused with 404", "refused with 501"  # whoever answers so
WAITED_FOR = {NO_ROOM, "503 draining"}  # half an answer does not break off for these


class Routed:
    """One router, and what the auditor knows of it."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.front: Front | None = None  # None: it is not there
        self.starts_s: list[float] = []
        self.latest: set[str] = set()  # requests that ended since its last start

    @property
    def router(self) -> Any:
        assert self.front is not None, "it is there"
        return self.front.router


class Audit:
    """Collects what does not hold; a seed has failed if anything is there at the end."""

    def __init__(
        self,
        replicas: Sequence[ScriptedReplica],
        routers: Collection[Routed],
        keys: EditedFile[Key] | None,
        fleet: EditedFile[ReplicaSpec] | None,
    ) -> None:
        self.failures: list[str] = []
        self.asked: dict[str, Asked] = {}
        self.reached: Counter[tuple[str, str]] = Counter()  # rows and columns of the table of retries
        self.by_client: dict[str, Routed] = {}  # the router that it asks
        self.outages: list[tuple[float, float]] = []  # in which nobody was heard
        self._replicas, self._routers, self._keys, self._fleet = replicas, routers, keys, fleet
        self._lines: dict[str, list[Line]] = {}  # by the request's id
        self._lost_s: dict[str, list[float]] = {}
        self._beside: dict[str, list[tuple[float, bool]]] = {}  # those that waited with a full queue when one ended

    def fail(self, what: str) -> None:
        if what not in self.failures:
            self.failures.append(what)

    def asks(self, one: Asked) -> Routed:
        """Return the router that it came to."""
        return self.by_client[one.id.partition("-")[0]]

    # ---- while it lasts

    def answered(self, routed: Routed, line: Line) -> None:
        """Look at a request at the moment of its end."""
        self._lines.setdefault(line.request_id, []).append(line)
        routed.latest.add(line.request_id)
        if routed.front is not None and len(waiting := routed.router.waiting) >= waiting.capacity:
            self._beside[line.request_id] = [(one.came_s, one.has_begun) for one in waiting.in_order()]

    def lost(self, request_id: str, now_s: float) -> None:
        """Note that a router has lost a request at a replica, which may not have read it yet."""
        self._lost_s.setdefault(request_id, []).append(now_s)

    def step(self, now_s: float) -> None:
        """Every structure is sound, nothing is stuck, and nobody works for a request that is over."""
        for routed in self._routers:
            if routed.front is not None:
                self._structures(routed.front)
                self._members(routed, now_s)
                self._settled(routed, now_s)
        at: dict[str, str] = {}
        for replica in self._replicas:
            for one in [*replica.running, *replica.waiting]:
                if one.id not in self.asked:
                    continue  # the router's own
                since_s = max(self.asked[one.id].ended_s, replica.host.troubled_s)
                if replica.host.silent or one.is_lost or now_s - max(one.came_s, replica.host.troubled_s) < KNOWN_S:
                    continue
                if now_s - since_s > KNOWN_S:
                    self.fail(f"{replica.name} works for {one.id}, which is over")
                if one.id in at:
                    self.fail(f"{at[one.id]} and {replica.name} work for {one.id}")
                at[one.id] = replica.name

    def _structures(self, front: Front) -> None:
        router: Any = front.router
        placement, attempts = router.placement, Counter(one.member.name for one in router.attempts)
        of_peers = [] if front.links is None else [*front.links.inbox.peers.values()]
        loads = Counter(id(placed.load) for peer in of_peers for placed in peer.requests.values())
        try:
            if front.links is not None:
                front.links.inbox.check()
            for checked in (placement.index, placement.index.optimistic, placement.guesses, router.waiting):
                checked.check()
            router.admission.check()
            for member in router.members:
                member.load.check()
                most = attempts[member.name] + loads[id(member.load)]
                assert 0 <= member.candidate.in_flight <= most, f"{member.name}: {member.candidate}"
            for request in router.waiting.in_order():
                assert request.flow.state is not OVER, "a request waits for room, and is over"
            assert len(router.waiting) + len(router.attempts) <= router.lifecycle.open_requests
        except AssertionError as error:
            self.fail(f"a structure of the router is not sound: {error!r}")

    def _members(self, routed: Routed, now_s: float) -> None:
        """Demand that the router's replicas are those of the file or the cluster at a moment that is not long ago."""
        assert routed.front is not None
        found = {name: server.spec for name, server in routed.router.members.servers.items()}
        if not routed.front.discovery.complete:
            routed.starts_s.append(now_s)  # whom it asks for its replicas does not answer
        elif self._fleet is not None and found not in self._fleet.in_force(now_s, now_s):
            self.fail(f"its replicas are {found}")

    def _settled(self, routed: Routed, now_s: float) -> None:
        """Demand of each replica that has been well for a while: its cache is known, no dead connection waited on."""
        router, host = routed.router, routed.host
        named = [] if self._fleet is None else self._fleet.in_force(now_s - SETTLED_S, now_s)
        for replica in self._replicas:
            specs = {one.get(replica.name) for one in named}
            since_s = max(replica.well_since_s, replica.host.troubled_s, host.troubled_s, routed.starts_s[-1])
            is_well = not (replica.is_troubled or replica.host.silent) and host.has_sockets
            is_well &= len(specs - {None}) == len(specs) < 2  # and named so all the time
            if isinstance(replica, VllmReplica) or not is_well or now_s - since_s < SETTLED_S:
                continue
            for attempt in router.attempts:
                connection = None if attempt.sending is None else attempt.sending.connection
                is_dead = connection is not None and connection.transport.is_lost
                if attempt.member.name == replica.name and is_dead and attempt.goes_on and not attempt.is_paused:
                    self.fail(f"an answer of {replica.name} waits on a connection that is dead")
            if now_s - replica.publisher.published_s >= SETTLED_S:
                try:
                    self._is_known(router, replica)
                except AssertionError as error:
                    self.fail(f"{replica.name} has been well for a while: {error}")

    # ---- when all is over

    def clients(self) -> None:
        """Each request has ended once, for client and router, within the limits, and with the bytes that it should."""
        answerings: dict[str, list[Answering]] = {}
        for replica in self._replicas:
            self.failures += [f"{replica.name}: {found}" for found in replica.found]
            for answering in replica.answerings:
                answerings.setdefault(answering.id, []).append(answering)
            if self._fleet is not None:
                self._was_named(self._fleet, replica)
        for one in self.asked.values():
            if (found := self._end(one, answerings.get(one.id, []))) is not None:
                self.fail(f"{one.id}: {found}")

    def _was_named(self, fleet: EditedFile[ReplicaSpec], replica: ScriptedReplica) -> None:
        """Demand that nothing was sent to it while the file of replicas named it no more, or as one that drains."""
        sent = [(one.sent_s, one.id) for one in replica.answerings] + [(one.sent_s, one.id) for one in replica.effects]
        for sent_s, id in sent:
            specs = [named.get(replica.name) for named in fleet.in_force(sent_s, sent_s)]
            if all(spec is None or spec.draining for spec in specs):
                self.fail(f"{id} was sent to {replica.name}, which was to get nothing any more")

    def _end(self, one: Asked, answerings: list[Answering]) -> str | None:
        """Return what is wrong with the end of a request."""
        lines, keys = self._lines.get(one.id, []), self._keys_of(one)
        if one.ends == [LEFT] and not lines:
            return None  # the router may never have heard of it
        if one.longest_wait_s > WAITS_S:
            return f"nothing came for {one.longest_wait_s:.1f} s"
        if one.ends == [LIMITED] and one.key is not None and not lines:
            return None  # it was not admitted
        if one.ends == [UNKNOWN]:
            return None if one.key is not None and None in keys else "its key is refused"
        if len(self.asks(one).starts_s) > 1 and not lines and one.ends[0].startswith(AT_A_RESTART):
            return None
        if len(one.ends) != 1 or len(lines) != 1:
            return f"it ended {one.ends} for its client, and {len(lines)} times for the router"
        if one.key is not None and not any(keys):
            return "it was admitted, though its key is removed"
        salts = {None if key is None else key.salt for key in keys if key is not None or one.key is None}
        for answering in answerings:
            if answering.salt not in salts:
                return f"{answering.replica.name} was told the salt {answering.salt}"
        if (times := sum(effect.id == one.id for replica in self._replicas for effect in replica.effects)) > 1:
            return f"it had {times} effects"
        if one.ends == ["whole"]:
            if one.is_wrong:
                return "it was answered, though its body is no JSON"
            if one.answer != self._undisturbed(one):
                return "other bytes than of an undisturbed replica"
            return None if one.is_tool else self._charged(one, lines[0], answerings)
        if one.ends == [LEFT] or self._may_end_so(one, answerings):
            return None
        return f"{one.ends}, though a replica was always well"

    def _keys_of(self, one: Asked) -> list[Key | None]:
        """The versions that its key may have had when it was admitted; None: it was unknown then, or it has none."""
        if self._keys is None or one.key is None:
            return [None]
        until_s = min(one.ended_s, one.asked_s + ADMITTED_S)
        return [named.get(one.key) for named in self._keys.in_force(one.asked_s, until_s)]

    @staticmethod
    def _charged(one: Asked, line: Line, answerings: list[Answering]) -> str | None:
        """Return what is wrong with the figures of a whole answer."""
        if any(isinstance(answering, VllmAnswering) for answering in answerings):
            return None  # only some of its answers have figures
        begun = [answering for answering in answerings if answering.cached is not None]
        first = [answering for answering in begun if answering.replica.name == one.replica or not one.streams]
        hits = {answering.cached for answering in first}
        if line.output_tokens != one.max_tokens or line.prompt_tokens != begun[0].prompt_tokens:
            return f"{line.prompt_tokens} and {line.output_tokens} tokens are charged"
        return None if line.cached_tokens in hits else f"{line.cached_tokens} tokens are charged as cached, not {hits}"

    def _may_end_so(self, one: Asked, answerings: list[Answering]) -> bool:
        """Tell if a client may be told so: it is the last refusal, or its request was lost too often."""
        end = one.ends[0]
        if one.is_wrong or (end == LIMITED and one.key is not None):
            return one.is_wrong == (end == "refused with 400 None")
        if one.is_tool and end == "refused with 502 replica_lost":
            return True
        has_just_begun = any(0 < one.asked_s - start_s < BEGINS_S for start_s in self.asks(one).starts_s)
        if end == NO_REPLICA and has_just_begun:
            return True
        if end == NO_REPLICA and self.asks(one).host.lacked_socket_s >= one.asked_s:
            return True
        told = set[str]().union(*(replica.refusals.get(one.id, ()) for replica in self._replicas))
        had_no_room = self._had_no_room(one)
        was_cut_off = any(from_s <= one.ended_s and one.asked_s <= to_s + SETTLED_S for from_s, to_s in self.outages)
        was_lost = any(replica.host.troubled_s >= one.asked_s for replica in self._replicas)  # perhaps at the other one
        excuses = NO_ROOM in told, was_cut_off, was_lost, one.is_tool, has_just_begun, end.startswith(PASSED_ON)
        if end.removeprefix("refused with ") in told and any(excuses):
            return True
        is_short = self.asks(one).router.waiting.capacity < len(self.asked)  # the router's queue
        if end == f"refused with {NO_ROOM}":
            waited = one.ended_s - one.asked_s >= QUEUE_TIMEOUT_S
            return had_no_room or is_short or waited or NO_ROOM in told
        was_late = any(answering.lost_s - answering.sent_s >= FIRST_TOKEN_TIMEOUT_S for answering in answerings)
        if end == NO_REPLICA and ((is_short and was_cut_off) or was_late):
            return True  # what takes too long at a replica is not sent there again
        if end == "broken off" and (had_no_room or told - WAITED_FOR or one.longest_wait_s >= QUEUE_TIMEOUT_S):
            return True
        if end == "broken off" and any(not answering.replica.resumes for answering in answerings):
            return True
        if end == "broken off" and not self._has_tokenizer(one):
            return True
        begun = [one for one in answerings if isinstance(one, SglangAnswering) and one.cached is not None]
        if end == "broken off" and any(one.lost_s < math.inf or one.replica.host.troubled_s > 0 for one in begun):
            return True  # it tells no tokens in chats
        losses = self._lost_s.get(one.id, [])
        return len(losses) >= MAX_LOST and any(later - lost > PAUSE_S for lost, later in pairwise(losses))

    def _has_tokenizer(self, one: Asked) -> bool:
        """Tell if the router had one of ours, and the same engines, all the time; vLLMs do not tell their tokenizer."""
        ours = {replica.name for replica in self._replicas if not isinstance(replica, VllmReplica)}
        fleets = [] if self._fleet is None else self._fleet.in_force(one.asked_s, one.ended_s)
        engines = {frozenset(spec.engine for spec in named.values()) for named in fleets}
        return bool(ours) and len(engines) < 2 and all(ours & named.keys() for named in fleets)

    def _had_no_room(self, one: Asked) -> bool:
        """Tell if the router's queue was full of begun answers and of requests that came before this one.

        With keys, those that have had less come before it, too.
        """
        beside = self._beside.get(one.id)
        if beside is None or self._keys or one.is_tool:
            return beside is not None
        decisions = self.asks(one).router.history.decisions
        past = next((past for past in decisions if past.outcome.request_id == one.id), None)
        if past is None:
            return True  # of an earlier start
        came_s = past.decision.question.came_s
        return came_s is not None and all(has_begun or other_s < came_s for other_s, has_begun in beside)

    def _undisturbed(self, asked: Asked) -> bytes:
        if asked.is_tool:
            return effect_of(asked.text)
        raw = json.dumps(chat(asked.text, max_tokens=asked.max_tokens)).encode()
        tokens = tokens_of(pack_tokens(PROMPTS.chat(read(raw, ChatRequest))), asked.max_tokens)
        return without_own(b"".join(stream_of(tokens, 0, "", 0)) if asked.streams else whole_of(tokens, "", 0))

    async def router(self, routed: Routed) -> None:
        """Nothing is left of any request, every structure is sound, and the index has what the replicas have."""
        router = routed.router
        try:
            await Served(cast(Front, routed.front), 0, {}).idle()
            for replica in self._replicas:
                replica.check_at_rest()
                self._is_known(router, replica)
                member = router.members.by_name[replica.name]
                assert not len(member.candidate.queue_positions), f"prompts wait at {replica.name}"
                assert not member.accuracy.different, f"{member.accuracy.different} predictions of it were wrong"
            if routed.front is not None and routed.front.links is not None:
                heard = [*routed.front.links.inbox.peers.values()]
                assert len(heard) == len(self._routers) - 1, f"it hears {len(heard)} peers"
                assert not any(peer.requests for peer in heard), f"requests of peers are not forgotten: {heard}"
            held_bytes = router.held.held_bytes, router.bodies.used_bytes
            assert held_bytes == (0, 0), f"{held_bytes} bytes of answers and bodies are held"
            self._charges(routed)
        except (AssertionError, TimeoutError) as error:
            self.fail(f"the router is not at rest: {error!r}")

    @staticmethod
    def _is_known(router: Any, replica: ScriptedReplica) -> None:
        """Demand that the index has the very blocks that this replica has."""
        member, index = router.members.by_name[replica.name], router.placement.index
        is_exact = member.feed is not None and member.feed.inexact is None
        assert is_exact or isinstance(replica, VllmReplica), f"{replica.name} is not exact: {member.feed_state}"
        slot, blocks = member.slot, replica.blocks
        held = sum(index.blocks(slot).values())
        known_ones = sum(mask >> slot & 1 for mask in index.holders(blocks))
        assert known_ones == held, f"of {held} blocks, {replica.name} has only {known_ones}"
        assert held == len(blocks) or not is_exact, f"{replica.name} has {len(blocks)} blocks, not {held}"

    def _charges(self, routed: Routed) -> None:
        """Demand that keys were charged for what was computed, and that nothing of theirs runs any more."""
        router = routed.router
        charged = dict(router.ledger.totals())
        for name in self._keys.tables if self._keys is not None else ():
            asked = [one for one in self.asked.values() if one.key == name and one.id in routed.latest]
            lines = {one.id: self._lines[one.id][0] for one in asked}
            found = charged.get(name, Counts())
            whole = [one for one in asked if one.ends == ["whole"] and not one.is_tool]
            prompts = sum(lines[one.id].prompt_tokens or 0 for one in whole)
            assert prompts <= found.computed_tokens + found.cached_tokens, f"{name}: {found} for {prompts} of prompts"
            generated = sum(one.max_tokens for one in whole)
            most = sum(line.output_tokens or 0 for line in lines.values())
            is_told = not any(isinstance(replica, VllmReplica) for replica in self._replicas)  # else events are counted
            is_right = not is_told or generated <= found.generated_tokens <= most
            assert is_right, f"{name}: {found} for {generated} to {most} generated"
            with router.admission.shared.opened(name) as state:
                assert not state.in_flight, f"{name} has {state.in_flight} requests in flight"
                if self._is_counted(name):
                    tokens = found.computed_tokens, found.cached_tokens, found.generated_tokens
                    assert state.today[1:] == tokens, f"{name} is charged {state.today} today, and used {found}"
                    sure = sum(line.status != 429 for line in lines.values())
                    refused = sum(one.ends == [LIMITED] for one in asked)
                    requests, most = state.today.requests, len(lines) - refused
                    assert sure <= requests <= most, f"{name} is charged {requests} requests, not {sure} to {most}"

    def _is_counted(self, name: str) -> bool:
        """Tell if all that a key has used was counted, on one day: whenever it was there, it had limits."""
        assert self._keys is not None, "whoever has a name is in the file"
        keys = [named[name] for named in self._keys.versions if name in named]
        days = {clock_s // DAY_S for clock_s in self._replicas[0].loop.clocks_s}
        return len(days) == 1 and all(limits_of(key) or key.max_in_flight is not None for key in keys)

    def ended(self, host: Host) -> None:
        if host.ends or host.listeners:
            self.fail(f"after the router's end it still has {[*host.ends, *host.listeners]}")

    def drained(self, requests: int) -> None:
        if requests:
            self.fail(f"{requests} requests are open after the router's drain")
