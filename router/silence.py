"""Replicas that have fallen silent: suspected, and relieved of their requests where others can take them."""

import logging
import math

from router.core import Router
from router.members.members import Member, Server
from router.placement.eligibility import can_take

log = logging.getLogger(__name__)

GIVEN_UP_S = 1.7  # without a heartbeat, which comes between an engine's steps: a long one is no death
QUIET_S = 0.3  # without a byte, while answers are awaited: is it frozen?
JUST_NOW_S = 0.2  # since something was heard: a tick of the clock that came late
# A replica's silence is its own only if others were heard meanwhile: else the network or this machine is silent.
LIVELY_S = 0.6  # since the last heartbeat of another one: two may be missed
RECOVERY_S = 2.0  # for streams to continue after a silence; connections may have died of it, or wait for long


def is_quiet(server: Server, now_s: float) -> bool:
    """Return whether a native replica owes answers and sends none: its server may be frozen and its engine not."""
    return server.native and not server.upstream.spoken and now_s - server.quiet_since_s > QUIET_S


class Silence:
    """Judges the silence of each replica beside that of the others."""

    def __init__(self, router: Router) -> None:
        self._router = router

    @property
    def _servers(self) -> dict[str, Server]:
        return self._router.members.servers

    def suspect(self, server: Server, reason: str, since_s: float) -> None:
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
        log.warning("%s: heard again after %.1f s", server.name, now_s - server.silent_since_s)
        server.suspicion, server.recovered_s = "", now_s
        server.upstream.drop_idle()

    def look(self, server: Server, now_s: float) -> None:
        health = server.health
        if health.silent_s > GIVEN_UP_S:
            self.suspect(server, "no heartbeat comes from it any more", now_s - health.silent_s)
        elif server.suspicion and now_s - server.alive_s < JUST_NOW_S:
            self._recovered(server, now_s)

    def move_unheard(self, now_s: float) -> None:
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
