"""The wanted state in Ray's own store: it outlives the controller, and the head node where Ray keeps it outside."""

import asyncio

from ray.experimental import internal_kv

STATE = b"wanted"
PORT = b"port"


class RayStateStore:
    def __init__(self, namespace: str) -> None:
        self._namespace = f"warmroute.{namespace}".encode()

    async def load(self) -> bytes | None:
        return await self._get(STATE)

    async def save(self, state: bytes) -> None:
        await self._put(STATE, state)

    async def clear(self) -> None:
        for key in (STATE, PORT):
            await asyncio.to_thread(internal_kv._internal_kv_del, key, namespace=self._namespace)

    async def port(self) -> int:
        """Return the port of an earlier controller; 0 without one."""
        return int(await self._get(PORT) or b"0")

    async def keep_port(self, port: int) -> None:
        await self._put(PORT, str(port).encode())

    async def _get(self, key: bytes) -> bytes | None:
        found: bytes | None = await asyncio.to_thread(internal_kv._internal_kv_get, key, namespace=self._namespace)
        return found

    async def _put(self, key: bytes, value: bytes) -> None:
        await asyncio.to_thread(internal_kv._internal_kv_put, key, value, overwrite=True, namespace=self._namespace)
