"""Work over a whole fleet in pieces, so that requests are served in between."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

AT_A_TIME = 50  # replicas: less than a millisecond

T = TypeVar("T")


async def paused(many: Iterable[T], by: int = AT_A_TIME) -> AsyncIterator[T]:
    for number, one in enumerate(many, 1):
        yield one
        if number % by == 0:
            await asyncio.sleep(0)
