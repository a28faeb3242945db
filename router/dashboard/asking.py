"""What the replicas of a small fleet say of themselves: their /metrics, asked for while somebody watches."""

import asyncio
import logging
from collections import deque

from router.core import Router
from router.doctor.comparing import needed, own_figures
from router.doctor.figures import Own
from router.doctor.samples import BadMetrics, Samples
from router.fetch import fetch
from router.members import Member
from router.upstream import Broken

log = logging.getLogger(__name__)

MOST_REPLICAS = 32  # of a larger fleet that would be too much to ask for and to read
TIMEOUT_S = 2.0
KEPT = 3  # answers of each; the oldest is compared with the newest


class Asking:
    """`ask` now and then, and `forget` when nobody watches any more."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._said: dict[Member, deque[Samples]] = {}
        self._asking: asyncio.Task[None] | None = None

    def ask(self) -> None:
        """Nobody waits for the answers."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())

    def forget(self) -> None:
        self._said.clear()
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None

    def own(self, member: Member, index: tuple[float, float] | None) -> Own | None:
        """`index`: how many of its blocks the router knows, and how many more than before."""
        said = self._said.get(member)
        return own_figures(said[0], said[-1], index) if said else None

    async def _ask(self) -> None:
        try:
            members = list(self._router.members)
            if len(members) > MOST_REPLICAS:
                members = []
            self._said = {member: said for member in members if (said := self._said.get(member)) is not None}
            await asyncio.gather(*map(self._ask_one, members))
        except Exception:  # what is not known is not judged
            log.exception("The replicas' metrics could not be asked for: the router's own mistake")

    async def _ask_one(self, member: Member) -> None:
        try:
            answer = await fetch(member.upstream, "/metrics", lines=member.key_line, timeout_s=TIMEOUT_S)
            samples = Samples(needed(answer.body) if answer.status == 200 else "")
        except (Broken, BadMetrics):
            self._said.pop(member, None)
            return
        self._said.setdefault(member, deque(maxlen=KEPT)).append(samples)
