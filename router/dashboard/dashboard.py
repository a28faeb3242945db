"""The dashboard of one router, and its stream of frames as a response."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msgspec.structs import asdict
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.dashboard.broadcast import Broadcast, FeedQuery, Subscriber
from router.dashboard.sampling import EVERY_S, REPLICA_POINTS, REPLICA_SERIES, Series
from router.dashboard.sharing import SharedPrefixes
from router.dashboard.status import Statuses, for_clients
from router.members.members import Member
from router.tenants.keys import Key

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
    """Run the `sampling` of its statuses for the router's lifetime, and close its `broadcast` when that ends."""

    statuses: Statuses
    prefixes: SharedPrefixes
    broadcast: Broadcast

    def replica(self, member: Member, *, admin: bool) -> dict[str, Any]:
        """The page of one replica."""
        statuses, sampling = self.statuses, self.statuses.sampling
        replica, feed = statuses.one(member), member.feed
        sampled, done, recent = sampling.sampled(member), sampling.counts(member), sampling.recently(member)
        series = Series(REPLICA_SERIES, REPLICA_POINTS) if sampled is None else sampled.series
        over_s, stream = sampling.over_s(), None
        if replica.events is not None and feed is not None:
            stream = {
                **asdict(replica.events),
                "batches": feed.view.stream.stats.batches,
                "stored_blocks": feed.stored,
                "removed_blocks": feed.removed,
                "stored_per_s": round(recent.stored_blocks / over_s, 3),
                "removed_per_s": round(recent.removed_blocks / over_s, 3),
                "digest_checks": feed.view.stream.stats.digests_compared,
            }
        return {
            "replica": replica if admin else for_clients(replica),
            "stream": stream,
            "counts": {
                **{name: getattr(done, name) for name in ("requests", "errors", "prompt_tokens", "matched_tokens")},
                "predictions": member.accuracy.compared,
                "wrong_predictions": member.accuracy.different,
                "resyncs": member.resyncs,
                "faults": member.server.faults,
            },
            "history": {"interval_s": EVERY_S, **series.columns()},
        }
