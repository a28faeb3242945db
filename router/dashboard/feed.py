"""A watcher's stream as an answer: it ends when the client leaves, or when there is nothing more to show."""

import asyncio
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.dashboard.watching import Watcher, Watching, Wish
from router.keys import Key

STUCK_S = 60.0  # for one frame to be taken: whoever reads none keeps no place from others
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # a proxy that collects it would show nothing
]


class Feed(Response):
    def __init__(self, watching: Watching, wish: Wish, key: Key | None) -> None:
        super().__init__()
        self._key = key
        self._watching = watching
        self._wish = wish

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ApiError, before anything is sent, where nobody else can watch."""
        client = scope["client"]
        watcher = self._watching.join(self._wish, self._key, client[0] if client else "")
        telling = asyncio.create_task(self._tell(watcher, send, scope["state"]["abort"]))
        leaving = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait({telling, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._watching.leave(watcher)
            telling.cancel()
            leaving.cancel()
        await asyncio.wait({telling, leaving})
        if not telling.cancelled():
            telling.result()

    async def _tell(self, watcher: Watcher, send: Send, abort: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
        async for part in self._watching.frames(watcher):
            aborting = loop.call_later(STUCK_S, abort)
            try:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            finally:
                aborting.cancel()
        await send({"type": "http.response.body", "body": b""})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
