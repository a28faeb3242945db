"""Waits for the first of several tasks."""

import asyncio
from typing import Any


async def first(*tasks: "asyncio.Task[Any]", beside: "asyncio.Task[Any] | None" = None) -> "set[asyncio.Task[Any]]":
    """Return the tasks that ended first, and cancel the others, except for `beside`."""
    try:
        done, _ = await asyncio.wait([*tasks, *([beside] if beside else [])], return_when=asyncio.FIRST_COMPLETED)
        return done
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
