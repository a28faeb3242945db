"""Replicas that have fallen silent: suspected, and relieved of their requests where others can take them.

Of another engine than ours, the server may answer health checks while the engine computes nothing: it sleeps, it was
paused, its process was stopped. Signs that it computes are bytes of answers, events of its cache, and counts in its
metrics that only its steps change; so a long prompt is no silence.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from engines.metrics import is_asleep, scraped_steps
from router.members.health import ASLEEP, STALLED
from router.members.members import Member, Server
from router.placement.cost import can_take

log = logging.getLogger(__name__)

GIVEN_UP_S = 1.7  # the time without a heartbeat, or more if the replica's steps take longer
QUIET_S = 0.3  # the time without a byte while answers are awaited: is it frozen?
JUST_NOW_S = 0.2  # heard this recently, a tick of the clock came late
# A replica's silence is its own only if others were heard meanwhile: else the network or this machine is silent.
LIVELY_S = 0.6  # another replica's heartbeat is this recent: two may be missed
STALLED_S = 2.5  # the time without a sign that an engine computes, while it owes answers
STEPS = 2.5  # the factor on its longest step lately, if that is longer
MAX_STALLED_S = 12.0
CHUNK_TOKENS = 8192  # engines compute this many tokens of a prompt in one step
SLOWEST_TOKENS_PER_S = 1000.0  # a lower rate is that of short prompts, whose time is not for their tokens
SCRAPE_S = 0.5  # between two looks at the metrics of an engine that gives no other sign
SCRAPED_LATELY_S = 1.5  # else its server does not answer either, and other rules judge it
RECOVERY_S = 2.0  # streams have this long to continue after a silence; connections may have died of it


def is_quiet(server: Server, now_s: float) -> bool:
    """Return whether a replica of ours owes answers and sends none: its server may be frozen and its engine not."""
    return server.profile.answers_at_once and not server.upstream.spoken and now_s - server.quiet_since_s > QUIET_S


class RunningRequests(Protocol):
    """The requests at replicas, and those that wait for one."""

    def move_unheard(self, to: Mapping[Server, Sequence[Member]]) -> None: ...
    def is_stuck(self, server: Server) -> bool: ...
    def sweep(self, now_s: float, gap_s: float) -> None: ...
    def room(self) -> None: ...


@dataclass(slots=True, eq=False)
class SuspectDetector:
    """Judges the silence of each replica beside that of the others."""

    servers: Mapping[str, Server]
    requests: RunningRequests
    now_s: Callable[[], float]

    def suspect(self, server: Server, reason: str, since_s: float) -> None:
        """Suspect a replica of being frozen or cut off; its requests then move to others where possible."""
        if not server.suspicion:
            now_s = self.now_s()
            log.warning("%s: suspected: %s", server.name, reason)
            server.silent_since_s, server.suspected_s = since_s, now_s
            for other in self.servers.values():  # replicas without a heartbeat
                if other.health.heard_age_s(now_s) is None:
                    other.health.probe_soon(now_s)
        server.suspicion = reason

    def recovered(self, server: Server, now_s: float) -> None:
        """Trust it again; streams that stay silent for a while from now on are to continue over other connections."""
        log.warning("%s: heard again after %.1f s", server.name, now_s - server.silent_since_s)
        server.suspicion, server.recovered_s = "", now_s
        server.upstream.drop_idle()

    # ---- an engine that computes nothing

    def is_doubtful(self, server: Server, now_s: float) -> bool:
        """Return whether to look at an engine's metrics now: it owes answers, and gives no sign that it computes."""
        if not server.profile.is_scraped or now_s - server.scraped_s < SCRAPE_S:
            return False
        return server.health.stalled is not None or now_s - server.worked_s > SCRAPE_S

    def scraped(self, server: Server, metrics: bytes, now_s: float) -> None:
        """Take from an engine's metrics whether it sleeps, and whether it has computed since the last time."""
        names = server.profile.metrics
        server.scraped_s, before, server.steps = now_s, server.steps, scraped_steps(metrics, names)
        if server.steps != before:
            server.tells_steps = before is not None
            server.works(now_s)
        if is_asleep(metrics, names):
            self._stall(server, ASLEEP, now_s)
        elif server.health.stalled == ASLEEP:
            self._works_again(server, now_s)

    def _stall(self, server: Server, reason: str, since_s: float) -> None:
        server.health.stall(reason)
        self.suspect(server, reason, since_s)

    def _works_again(self, server: Server, now_s: float) -> None:
        server.health.stall(None)
        server.longest_step_s, server.worked_s = 0.0, now_s  # the pause was no step
        self.recovered(server, now_s)

    def _look_at_engine(self, server: Server, now_s: float) -> None:
        """Suspect an engine that computes nothing although it should and its server answers, while others compute."""
        since_s = now_s - server.worked_s
        if not server.tells_steps or since_s < STALLED_S or now_s - server.scraped_s > SCRAPED_LATELY_S:
            return
        event_age_s = min(math.inf if member.feed is None else member.feed.event_age_s for member in server.members)
        server.worked_s = max(server.worked_s, now_s - event_age_s)
        quiet_s = now_s - server.worked_s
        # Some steps long it may give no sign, and each may compute a part of a long prompt.
        step_s = server.longest_step_s
        for candidate in (member.candidate for member in server.members):
            rate = max(candidate.prefill_tokens_per_s, SLOWEST_TOKENS_PER_S)
            step_s = max(step_s, min(candidate.queued_tokens, CHUNK_TOKENS) / rate)
        if quiet_s <= min(MAX_STALLED_S, max(STALLED_S, STEPS * step_s)):
            return
        others_work = any(  # if no other replica of one of its models works, the machine may stand still
            other is not server
            and other.unavailable is None
            and not other.suspicion
            and (now_s - other.worked_s < STALLED_S / 2 or not other.in_flight)
            and not set(other.models).isdisjoint(server.models)
            for other in self.servers.values()
        )
        if others_work:
            why = f"{STALLED}: no token, event or count for {quiet_s:.1f} s, with {server.in_flight} answers due"
            self._stall(server, why, server.worked_s)

    # ---- any replica

    def look(self, server: Server, now_s: float) -> None:
        health = server.health
        if health.stalled is None and server.in_flight and server.profile.is_scraped:
            self._look_at_engine(server, now_s)
        elif health.stalled not in (None, ASLEEP) and server.worked_s > server.suspected_s:
            self._works_again(server, now_s)
        if health.stalled is not None:
            return  # its server is heard, which says nothing
        if health.silent_s > GIVEN_UP_S + health.patience_s - health.config.silence_s:
            self.suspect(server, "no heartbeat comes from it any more", now_s - health.silent_s)
        elif server.suspicion and now_s - server.alive_s < JUST_NOW_S:
            self.recovered(server, now_s)

    def migrate_stalled(self, now_s: float) -> None:
        """Take requests away from suspected replicas, and restart those stuck at replicas that are heard again."""
        heard_again = [one for one in self.servers.values() if now_s - one.recovered_s > RECOVERY_S]
        to = {server: server.members for server in heard_again if not server.suspicion}
        suspected = [server for server in self.servers.values() if server.suspicion]
        if suspected:
            since_s = max(server.suspected_s for server in suspected)
            lively: dict[str, list[Member]] = {}  # those with room, by model, that were heard just now or since then
            for server in self.servers.values():
                heard_age_s = server.health.heard_age_s(now_s)
                is_lively = server.alive_s > since_s if heard_age_s is None else heard_age_s < LIVELY_S
                if is_lively and not server.suspicion:
                    for member in server.members:
                        if can_take(member.candidate):
                            for name in filter(member.serves, server.models):
                                lively.setdefault(name, []).append(member)
            to |= {one: [other for name in one.models for other in lively.get(name, ())] for one in suspected}
        if any(to.values()):
            self.requests.move_unheard(to)
        for server in heard_again:
            if server.suspicion or not self.requests.is_stuck(server):
                server.recovered_s = math.inf
