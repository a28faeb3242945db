"""The dashboard of one router: what is kept for it, and who is shown what."""

import asyncio

from router.admission import Admitted
from router.core import Router
from router.dashboard.feed import Feed
from router.dashboard.replica_page import MOST_PREFIXES, HeldPrefix, ReplicaPage, held_prefixes, page_of
from router.dashboard.rows import Looking, Query
from router.dashboard.sampling import Sampling
from router.dashboard.watching import Watching, Wish
from router.members import Member
from router.sharing import Told, told

TOLD_S = 10.0  # what prompts share is work for a thread, and changes slowly; then it is forgotten


class Dashboard:
    """`run` it for as long as the router lives; `close` it as soon as that is to end."""

    def __init__(self, router: Router) -> None:
        self.sampling = Sampling(router)
        looking = Looking(router, self.sampling)
        self.watching = Watching(router, self.sampling, looking)
        self._router = router
        self._looking = looking
        self._told: Told | None = None
        self._telling = asyncio.Lock()

    async def run(self) -> None:
        await self.sampling.run()

    def close(self) -> None:
        self.watching.close()

    def feed(self, query: Query, admitted: Admitted) -> Feed:
        return Feed(self.watching, Wish(query, admitted.admin), admitted.key)

    async def prefixes(self, member: Member) -> list[HeldPrefix]:
        """What it holds of what prompts share. It may have left when this returns."""
        return await held_prefixes(self._router, member, await self._shared())

    def replica(self, member: Member, prefixes: list[HeldPrefix] | None) -> ReplicaPage:
        return page_of(self._router, self.sampling, self._looking, member, prefixes)

    async def _shared(self) -> Told:
        async with self._telling:
            if self._told is None:
                self._told = await told(self._router, MOST_PREFIXES)
                asyncio.get_running_loop().call_later(TOLD_S, self._forget)
            return self._told

    def _forget(self) -> None:
        self._told = None
