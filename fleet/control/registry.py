"""The members as routers ask for them, by long polling (docs/discovery.md, "The registry")."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import msgspec

LONGEST_WAIT_S = 60.0

_encode = msgspec.json.Encoder().encode


class Registry:
    """Unknown until the first `publish`; a version that an earlier process gave out is none of ours."""

    def __init__(self) -> None:
        self.version = time.time_ns() // 1_000_000  # above all that a process before this one has given out
        self._members: list[dict[str, Any]] | None = None
        self._answer = b""
        self._changed = asyncio.Event()

    @property
    def known(self) -> bool:
        return self._members is not None

    def publish(self, members: Sequence[dict[str, Any]]) -> None:
        if self._members == members:
            return
        self.version += 1
        self._members = list(members)
        self._answer = _encode({"version": self.version, "members": self._members})
        self._changed.set()
        self._changed = asyncio.Event()

    def close(self) -> None:
        """Release all waiting requests."""
        self._changed.set()

    async def answer(self, after: int | None, wait_s: float) -> bytes | None:
        """The members, when they are others than at `after`, or after this wait. None: they are not known."""
        if after == self.version or not self.known:
            changed = self._changed
            try:
                async with asyncio.timeout(min(max(wait_s, 0.0), LONGEST_WAIT_S)):
                    await changed.wait()
            except TimeoutError:
                pass
        return self._answer if self.known else None
