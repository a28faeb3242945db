"""An HTTP server's app for mirrored copies of requests: it answers each at once, and queues what has room."""

import asyncio
import time
from collections import Counter, deque

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.errors import ApiError
from api.generation_apis import PATHS
from api.http.bodies import Bodies
from api.http.responses import error_response
from lab.shadow.incoming import Incoming
from router.http.endpoints import body_of

MOST_QUEUED = 4096
MOST_ID_CHARS = 128
REPLICA = "x-warmroute-replica"  # a header that names the replica to which the original goes
REQUEST_ID = "x-request-id"


class Mirror:
    """An ASGI app whose answers matter to nobody: senders of copies do not wait for them."""

    def __init__(
        self, most_body_bytes: int, most_bytes: int, skipped: Counter[str], *, most_queued: int = MOST_QUEUED
    ) -> None:
        """`most_bytes`: of all bodies that are being received, and again of all that are queued."""
        self._most_body_bytes = most_body_bytes
        self._most_bytes = most_bytes
        self._bodies = Bodies(most_bytes)
        self._most_queued = most_queued
        self._skipped = skipped
        self._queue: deque[Incoming] = deque()
        self._queued_bytes = 0
        self._has_some = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        answer = Response(status_code=204)
        if request.method == "POST" and scope["path"] in PATHS:
            try:
                async with body_of(request, self._most_body_bytes, self._bodies) as body:
                    self._offer(request, body)
            except ApiError as error:
                self._skipped["too large" if error.status == 413 else "no room" if error.status == 429 else "bad"] += 1
                answer = error_response(error)
                answer.headers["connection"] = "close"  # what still comes of it is not read
            except ClientDisconnect:
                self._skipped["cut off"] += 1
                return
        await answer(scope, receive, send)

    async def take(self) -> Incoming:
        """Wait for the next copy."""
        while not self._queue:
            self._has_some.clear()
            await self._has_some.wait()
        taken = self._queue.popleft()
        self._queued_bytes -= len(taken.body)
        return taken

    def end(self) -> None:
        """Count what is still queued as skipped."""
        if self._queue:
            self._skipped["left in the queue"] += len(self._queue)
            self._queue.clear()

    def _offer(self, request: Request, body: bytes) -> None:
        if len(self._queue) >= self._most_queued or self._queued_bytes + len(body) > self._most_bytes:
            self._skipped["no room"] += 1
            return
        self._queued_bytes += len(body)
        self._queue.append(
            Incoming(
                ts=time.time(),
                body=body,
                path=request.scope["path"],
                headers=request.headers.raw,
                request_id=request.headers.get(REQUEST_ID, "")[:MOST_ID_CHARS],
                replica=request.headers.get(REPLICA),
            )
        )
        self._has_some.set()
