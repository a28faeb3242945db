"""A page that watches a router, by hand: one frame after the other."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.router.http.test_app import LOCAL
from tests.router.scripted import DEADLINE_S, Client, Served, connect


class Page:
    def __init__(self, client: Client, path: str, headers: dict[str, str]) -> None:
        self._client = client
        self._path = path
        self._headers = headers
        self._at = 0.0

    async def next(self) -> Any:
        """The next frame that is another one."""
        async with asyncio.timeout(DEADLINE_S):
            while (frame := await self._frame())["at"] == self._at:
                await asyncio.sleep(0.005)
        self._at = frame["at"]
        return frame

    async def _frame(self) -> Any:
        answer = await self._client.get(self._path, **self._headers)
        assert answer.status == 200, answer
        return answer.json


@asynccontextmanager
async def watched(running: Served, query: str = "", **headers: str) -> AsyncIterator[Page]:
    async with connect(running.port, 2**20) as client:
        yield Page(client, f"/dashboard/fleet{query}", LOCAL | headers)
