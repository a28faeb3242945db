"""All kinds of discovery at once, as one set of replicas."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from router.discovery.wanted import Discovery, Wanted

log = logging.getLogger(__name__)


class Together:
    """Where two name the same replica, the one that stands first in the list counts."""

    def __init__(self, discoveries: Sequence[Discovery]) -> None:
        self.discoveries = discoveries
        self._said: list[Wanted | None] = [None] * len(discoveries)
        self._disputed: set[str] = set()

    @property
    def complete(self) -> bool:
        """Whether each has said something."""
        return None not in self._said

    def problems(self) -> dict[str, str]:
        return {each.where: each.problem for each in self.discoveries if each.problem is not None}

    async def run(self, apply: Callable[[Wanted], None]) -> None:
        """Calls `apply` with the whole set whenever it changes; ends by being cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for number, discovery in enumerate(self.discoveries):
                tasks.create_task(self._follow(number, discovery, apply))

    async def _follow(self, number: int, discovery: Discovery, apply: Callable[[Wanted], None]) -> None:
        async with contextlib.aclosing(discovery.watch()) as members:
            async for wanted in members:
                before, complete = self.wanted(), self.complete
                self._said[number] = wanted
                together = self.wanted()
                if together != before or self.complete != complete:
                    self._apply(apply, together)

    @staticmethod
    def _apply(apply: Callable[[Wanted], None], together: Wanted) -> None:
        try:
            apply(together)
        except Exception:  # what is said next is heard all the same, and so are the others
            log.exception("What discovery said could not be applied")

    def wanted(self) -> Wanted:
        together: Wanted = {}
        disputed: set[str] = set()
        for wanted in self._said:
            for name, spec in (wanted or {}).items():
                if together.setdefault(name, spec) is not spec and together[name] != spec:
                    disputed.add(name)
        for name in disputed - self._disputed:
            log.warning("Two sources name the replica %s; the one at %s counts", name, together[name].url)
        self._disputed = disputed
        return together
