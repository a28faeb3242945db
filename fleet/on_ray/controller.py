"""The controller's actor, on Ray's head node: it begins the replicas' actors, and finds them again after a restart."""

import asyncio
import errno
import logging
import os
import socket
import time
from typing import Any

import msgspec
import ray
from ray.experimental import internal_kv

from api.http.server import listen
from fleet.control import controller as control
from fleet.control.app import Serving
from fleet.on_ray.cluster import DETACHED, Actor, log_folder, node_address
from fleet.on_ray.hosts import RayHosts
from fleet.on_ray.replica import crash_on_bug
from fleet.plan import FleetPlan

log = logging.getLogger(__name__)

NAME = "controller"  # replicas' names end in a number
ON_HEAD = {"node:__internal_head__": 0.001}
STATE, PORT = b"wanted", b"port"  # keys of Ray's own store
PORT_WITHIN_S = 10.0  # a killed one may still hold it
PORT_AGAIN_S = 0.2

encode_plan = msgspec.json.Encoder().encode
_decode_plan = msgspec.json.Decoder(FleetPlan).decode


class Begun(msgspec.Struct, frozen=True):
    url: str = ""
    trouble: str = ""  # why it cannot begin


encode_begun = msgspec.json.Encoder().encode
decode_begun = msgspec.json.Decoder(Begun).decode


class RayStateStore(control.StateStore):
    """The wanted state in Ray's own store: it outlives the controller, and the head node where Ray keeps it outside."""

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


class Controller:
    def __init__(self, namespace: str, port: int, key: str) -> None:
        logging.basicConfig(
            filename=log_folder() / "warmroute-controller.log",
            level=logging.INFO,
            format="%(asctime)s %(levelname)s %(message)s",
        )
        self._store = RayStateStore(namespace)
        self._controller = control.Controller(RayHosts(namespace), self._store)
        self._key = key
        self._begun: asyncio.Future[Begun] = asyncio.get_running_loop().create_future()
        self._living = asyncio.get_running_loop().create_task(crash_on_bug(self._serve(port)))

    async def begun(self) -> bytes:
        return encode_begun(await asyncio.shield(self._begun))

    async def want(self, plan: bytes) -> None:
        self._controller.want(_decode_plan(plan))

    async def _serve(self, port: int) -> None:
        address, again = node_address(), ray.get_runtime_context().was_current_actor_reconstructed
        port = port or await self._store.port()
        try:
            listener = await _listen(address, port, PORT_WITHIN_S if again else 0.0)
        except OSError as error:
            if again:
                raise
            reason = os.strerror(error.errno) if error.errno else str(error)
            trouble = f"the controller cannot listen on {address}:{port}: {reason}; choose another port for it"
            self._begun.set_result(Begun(trouble=trouble))
            return
        await self._store.keep_port(listener.getsockname()[1])
        if await self._controller.restore():
            log.info("continuing with an earlier controller's plan")
        serving = Serving(self._controller, listener, self._key)
        await serving.start()
        log.info("serves at %s", serving.url)
        self._begun.set_result(Begun(url=serving.url))
        await serving.ended()
        await serving.close()
        log.info("the fleet has ended")
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


async def _listen(address: str, port: int, within_s: float) -> socket.socket:
    end_s = time.monotonic() + within_s
    while True:
        try:
            return listen(address, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > end_s:
                raise
            await asyncio.sleep(PORT_AGAIN_S)


def there(namespace: str) -> Actor | None:
    try:
        return ray.get_actor(NAME, namespace=namespace)
    except ValueError:
        return None


def make(namespace: str, port: int, key: str) -> Actor:
    """Create the controller's actor, or return the one created meanwhile."""
    options: Any = ray.remote(Controller).options(
        **DETACHED, name=NAME, namespace=namespace, num_cpus=0, resources=ON_HEAD
    )
    return options.remote(namespace, port, key)
