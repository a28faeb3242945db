"""Where the wanted state is kept, so that a controller that was restarted finds it."""

from typing import Protocol


class Memory(Protocol):
    async def load(self) -> bytes | None: ...

    async def save(self, state: bytes) -> None: ...

    async def clear(self) -> None: ...


class NoMemory:
    """Of a fleet that ends with its controller."""

    async def load(self) -> bytes | None:
        return None

    async def save(self, state: bytes) -> None: ...

    async def clear(self) -> None: ...
