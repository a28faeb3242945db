"""The router's own life: when it has begun, whether it is ready, and whether it is about to end."""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import time

from router.members.members import Members

INDEX_WITHIN_S = 30.0  # after the start; then the router serves with a partial index


@dataclass(slots=True, eq=False)
class Lifecycle:
    members: Members
    now_s: Callable[[], float]
    awaits_rewrites: bool = False  # the files of models: they have not been read yet
    started: int = field(default_factory=lambda: int(time()))
    open_requests: int = 0
    leaving: bool = False  # soon it takes no requests: each answer is the last of its connection
    draining: bool = False
    index_awaited_until_s: float = field(init=False)  # readiness waits for the index until then

    def __post_init__(self) -> None:
        self.index_awaited_until_s = self.now_s() + INDEX_WITHIN_S

    def not_ready(self, *, all_of_them: bool = False) -> str | None:
        """The reason why load balancers should wait, if there is one. At the start, caches still being read are one.

        Later they are not: one replica with unreachable events would take all routers away from clients.
        """
        members = [member for member in self.members if member.spec.role != "prefill"]
        waits = bool(self.members.expected)  # a Service sends it nothing while it is not ready
        if not members and not waits:
            return "no replica that generates is known yet" if len(self.members) else "no replica is known yet"
        if self.awaits_rewrites:
            return "the model rewrites have not been read yet"
        down = {member.name: why for member in members if (why := member.candidate.unavailable) is not None}
        up = [one for one in members if one.name not in down]
        if self.now_s() < self.index_awaited_until_s:
            unheard = [one.name for one in members if not (one.server.learned or one.server.trouble)]
            syncing = [one.name for one in up if one.index_state(one.feed_state) == "syncing"]
            if unheard or syncing:
                awaited = ", ".join([*unheard, *syncing])
                return f"the index is not complete: what {awaited} holds is still being read"
        if (len(down) == len(members) and not waits) or (down and all_of_them):
            return f"no requests are taken by {'; '.join(f'{name} ({why})' for name, why in down.items())}"
        return None
