"""A page that watches a router, by hand: the events of its stream, one after the other."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from tests.router.http.test_app import LOCAL
from tests.router.scripted import DEADLINE_S, Client, Served, connect


class Event(NamedTuple):
    name: str
    content: Any


class Page:
    def __init__(self, client: Client) -> None:
        self.client = client
        self._heard = b""

    async def event(self) -> Event:
        while b"\n\n" not in self._heard:
            part = await self.client.chunk()
            if not part:
                raise EOFError("the stream has ended")
            self._heard += part
        one, _, self._heard = self._heard.partition(b"\n\n")
        name, data = one.decode().split("\n")
        return Event(name.removeprefix("event: "), json.loads(data.removeprefix("data: ")))

    async def next(self, name: str) -> Any:
        """The content of the next event of this name."""
        async with asyncio.timeout(DEADLINE_S):
            while (found := await self.event()).name != name:
                pass
        return found.content

    async def ended(self) -> bool:
        try:
            while True:
                await self.event()
        except EOFError:
            return True


@asynccontextmanager
async def watched(running: Served, query: str = "", **headers: str) -> AsyncIterator[Page]:
    async with connect(running.port, 2**20) as client:
        client.send("GET", f"/dashboard/feed{query}", **(LOCAL | headers))
        status, said = await client.head()
        assert status == 200 and said["content-type"].startswith("text/event-stream"), (status, said)
        yield Page(client)
