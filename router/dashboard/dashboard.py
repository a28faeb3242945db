"""The dashboard of one router, and its stream of frames as a response."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.dashboard.broadcast import Broadcast, FeedQuery, Subscriber
from router.dashboard.replica_page import MAX_PREFIXES, HeldPrefix, held_prefixes, page_of
from router.dashboard.rows import Query
from router.dashboard.sampling import Sampling
from router.dashboard.sharing import SharedPrefixes, Told
from router.dashboard.status import Statuses
from router.members.members import Member
from router.tenants.admission import Admitted
from router.tenants.keys import Key

SHARED_S = 10.0  # keep the shared prefixes that long: computing them takes a thread, and they change slowly
STUCK_S = 60.0  # a client that takes longer to read a frame is disconnected
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # a buffering proxy would show nothing
]


class FeedResponse(Response):
    """Frames as server-sent events, until the client leaves or the stream ends.

    Starlette's own streams would leave cycles of references, which keep connections until the collector comes.
    """

    def __init__(self, broadcast: Broadcast, query: FeedQuery, key: Key | None) -> None:
        super().__init__()
        self._key = key
        self._broadcast = broadcast
        self._query = query

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raise ApiError before the response starts if there are too many subscribers."""
        client = scope["client"]
        subscriber = self._broadcast.join(self._query, self._key, client[0] if client else "")
        sending = asyncio.create_task(self._send_frames(subscriber, send, scope["state"]["abort"]))

        async def disconnected() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        leaving = asyncio.create_task(disconnected())
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._broadcast.leave(subscriber)
            sending.cancel()
            leaving.cancel()
        await asyncio.wait({sending, leaving})
        if not sending.cancelled():
            sending.result()

    async def _send_frames(self, subscriber: Subscriber, send: Send, abort: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
        async for part in self._broadcast.frames(subscriber):
            aborting = loop.call_later(STUCK_S, abort)
            try:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            finally:
                aborting.cancel()
        await send({"type": "http.response.body", "body": b""})


@dataclass(eq=False)
class Dashboard:
    """Run its `sampling` for the router's lifetime, and close its `broadcast` when that ends."""

    policy: str
    statuses: Statuses
    sampling: Sampling
    prefixes: SharedPrefixes
    broadcast: Broadcast
    _kept: Told | None = None
    _computing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def feed(self, query: Query, admitted: Admitted) -> FeedResponse:
        return FeedResponse(self.broadcast, FeedQuery(query, admitted.admin), admitted.key)

    async def held_prefixes(self, member: Member) -> list[HeldPrefix]:
        """The shared prefixes that the member holds. It may have left when this returns."""
        async with self._computing:
            if self._kept is None:
                self._kept = await self.prefixes.told(MAX_PREFIXES)
                asyncio.get_running_loop().call_later(SHARED_S, self._forget)
            shared = self._kept
        return await held_prefixes(self.prefixes, member, shared)

    def replica(self, member: Member, prefixes: list[HeldPrefix] | None) -> dict[str, Any]:
        return page_of(member, self.sampling, prefixes, self.policy)

    def _forget(self) -> None:
        self._kept = None
