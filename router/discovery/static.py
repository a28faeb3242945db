"""Replicas that the command line names, and that never change."""

import asyncio
from collections.abc import AsyncGenerator, Iterable

from router.discovery.wanted import Wanted
from router.spec import ReplicaSpec, by_name


class StaticList:
    where = "--replica"
    problem: str | None = None

    def __init__(self, specs: Iterable[ReplicaSpec]) -> None:
        self._wanted = by_name(specs)

    async def watch(self) -> AsyncGenerator[Wanted, None]:
        yield self._wanted
        await asyncio.get_running_loop().create_future()  # for ever
