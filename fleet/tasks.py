"""Waits for the first of several tasks, and raises its error."""

import asyncio
from collections.abc import Iterable
from typing import Any


async def first(*tasks: "asyncio.Task[Any]", beside: "Iterable[asyncio.Task[Any]]" = ()) -> "set[asyncio.Task[Any]]":
    """Return the tasks that ended first, and cancel the others, except for those `beside`."""
    try:
        done, _ = await asyncio.wait([*tasks, *beside], return_when=asyncio.FIRST_COMPLETED)
        return done
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def check(tasks: "Iterable[asyncio.Task[Any]]") -> None:
    """Raise the error that has ended a task, if there is one."""
    for task in tasks:
        if task.done() and not task.cancelled():
            task.result()
