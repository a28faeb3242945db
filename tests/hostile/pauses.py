"""Longest pause of the event loop, in CPU time of its thread: other processes do not count."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Pauses:
    def __init__(self) -> None:
        self.longest_s = 0.0

    async def watch(self) -> None:
        before_s = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now_s = time.thread_time()
            self.longest_s = max(self.longest_s, now_s - before_s)
            before_s = now_s


@asynccontextmanager
async def pauses() -> AsyncIterator[Pauses]:
    found = Pauses()
    watching = asyncio.create_task(found.watch())
    try:
        yield found
        await asyncio.sleep(0)  # the last pause is over, and counted
        await asyncio.sleep(0)
    finally:
        watching.cancel()
