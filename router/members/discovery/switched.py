"""Follows one generator after another, as a third one names them."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")
Choice = TypeVar("Choice")


class Ahead(Generic[Item]):
    """An endless generator whose next item is asked for beforehand, so that several can be waited for at once."""

    def __init__(self, items: AsyncGenerator[Item, None]) -> None:
        self._items = items
        self.next = asyncio.create_task(self._next())

    async def _next(self) -> Item:
        return await anext(self._items)

    def take(self) -> Item:
        item = self.next.result()
        self.next = asyncio.create_task(self._next())
        return item

    async def aclose(self) -> None:
        self.next.cancel()
        await asyncio.wait([self.next])
        await self._items.aclose()


async def switched(
    choices: AsyncGenerator[Choice, None], follow: Callable[[Choice], AsyncGenerator[Item, None]]
) -> AsyncGenerator[Item, None]:
    """Yield the items of the newest choice; those of earlier choices are closed, with all that they had not yielded."""
    newest, items = Ahead(choices), None
    try:
        while True:
            coming = (newest.next,) if items is None else (newest.next, items.next)
            await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
            if newest.next.done():
                choice = newest.take()
                if items is not None:
                    await items.aclose()
                items = Ahead(follow(choice))
            elif items is not None:
                yield items.take()
    finally:
        for each in (newest, items):
            if each is not None:
                await each.aclose()
