"""One generator after another: only the newest counts, mistakes come out, and nothing is left running."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from router.members.discovery.kubernetes import switched


class Told:
    """Generators that yield what a test tells them."""

    def __init__(self) -> None:
        self.queues: dict[str, asyncio.Queue[str | Exception]] = {}
        self.closed: list[str] = []

    def tell(self, name: str, *items: str | Exception) -> None:
        for item in items:
            self.queues.setdefault(name, asyncio.Queue()).put_nowait(item)

    async def items(self, name: str) -> AsyncGenerator[str, None]:
        try:
            while True:
                item = await self.queues.setdefault(name, asyncio.Queue()).get()
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.closed.append(name)

    def switched(self) -> AsyncGenerator[str, None]:
        return switched(self.items("choices"), self.items)


async def test_the_items_are_those_of_the_newest_choice() -> None:
    told = Told()
    async with aclosing(told.switched()) as items:
        told.tell("choices", "a")
        told.tell("a", "a1", "a2")
        assert [await anext(items), await anext(items)] == ["a1", "a2"]
        told.tell("choices", "b")
        told.tell("a", "a3")  # comes together with the other choice: too late
        told.tell("b", "b1")
        assert await anext(items) == "b1"
        assert told.closed == ["a"]
    assert sorted(told.closed) == ["a", "b", "choices"]


@pytest.mark.parametrize("where", ["choices", "a"])
async def test_a_mistake_comes_out_and_ends_both(where: str) -> None:
    told = Told()
    told.tell("choices", "a")
    told.tell("a", "a1")
    items = told.switched()
    assert await anext(items) == "a1"
    told.tell(where, OSError("a mistake"))
    with pytest.raises(OSError, match="a mistake"):
        await anext(items)
    assert sorted(told.closed) == ["a", "choices"]


@pytest.mark.parametrize("chosen", [False, True])
async def test_nothing_runs_on_when_it_is_cancelled(chosen: bool) -> None:
    told, before = Told(), asyncio.all_tasks()
    if chosen:
        told.tell("choices", "a")
    waiting = asyncio.ensure_future(anext(told.switched()))
    while chosen and "a" not in told.queues:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert sorted(told.closed) == (["a", "choices"] if chosen else ["choices"])
    assert asyncio.all_tasks() == before
