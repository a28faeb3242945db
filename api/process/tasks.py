"""Waits for the first of several tasks, ends them, and raises their errors."""

import asyncio
from collections.abc import Iterable
from typing import Any


async def first(*tasks: "asyncio.Task[Any]", beside: "Iterable[asyncio.Task[Any]]" = ()) -> "set[asyncio.Task[Any]]":
    """Return the tasks that ended first, and cancel the others, except for those `beside`."""
    try:
        done, _ = await asyncio.wait([*tasks, *beside], return_when=asyncio.FIRST_COMPLETED)
        return done
    finally:
        await end(tasks)


async def end(tasks: "Iterable[asyncio.Task[Any]]") -> None:
    """Cancel tasks, and wait for them."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


def check(tasks: "Iterable[asyncio.Task[Any]]") -> None:
    """Raise the error that has ended a task, if there is one."""
    for task in tasks:
        if task.done() and not task.cancelled():
            task.result()
