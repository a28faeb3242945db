"""Where the controller of `warmroute up` runs: in this process (`--no-ray`), or on Ray, which a child of it starts."""

import asyncio
import os
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct

from api.http.server import listen
from api.lifeline import PARENT_VARIABLE
from fleet.control.controller import Controller
from fleet.control.here import Here
from fleet.control.memory import NoMemory
from fleet.control.serving import Serving
from fleet.host.child import LAST_LINES, module
from fleet.on_ray.orders import Launched as RayLaunched
from fleet.on_ray.orders import Order, Trouble, decode_answer, encode
from fleet.plan import FleetPlan
from fleet.up.watching import CannotStart

CLOSE_LIMIT_S = 15.0
NOTHING = FleetPlan(models=())


class Launched(Struct, frozen=True):
    controller: str  # its URL
    logs: str | None  # the folder of the replicas' logs, if it is on this machine
    found: bool = False  # whether the fleet was there already


class Launcher(Protocol):
    @property
    def clean(self) -> bool:
        """Whether all ended as it should."""
        ...

    async def start(self, plan: FleetPlan) -> Launched: ...

    async def failed(self) -> str:
        """Returns only if the controller cannot go on, and says why."""
        ...

    async def close(self) -> None:
        """After the fleet has ended, or in its place where it cannot be ended in order."""
        ...

    def kill(self) -> None:
        """All processes of the fleet on this machine, at once."""
        ...


class InThisProcess:
    def __init__(self, logs: Path, key: str) -> None:
        self.hosts = Here(logs)
        self._logs = logs
        self._key = key
        self._serving: Serving | None = None

    @property
    def clean(self) -> bool:
        return self.hosts.clean

    async def start(self, plan: FleetPlan) -> Launched:
        controller = Controller(self.hosts, NoMemory())
        controller.want(plan)
        self._serving = Serving(controller, listen("127.0.0.1", 0), self._key)
        await self._serving.start()
        return Launched(self._serving.url, str(self._logs))

    async def failed(self) -> str:
        assert self._serving is not None, "it was not started"
        await self._serving.ended()
        await asyncio.get_running_loop().create_future()  # it was told to end: nothing has failed
        raise AssertionError

    async def close(self) -> None:
        if self._serving is not None:
            await self._serving.close()

    def kill(self) -> None:
        self.hosts.kill()


class OnRay:
    """A child of this process starts Ray here, and holds it, or joins that at `address`, and leaves the fleet there.

    The child is the driver, as Ray calls it, and not the process of the router: a driver dies with its head node.
    """

    def __init__(self, folder: Path, address: str | None, namespace: str, port: int, key: str) -> None:
        self.clean = True
        self._folder = folder
        self._local = address is None
        self._order = Order(
            plan=NOTHING,
            address=address,
            namespace=namespace,
            port=port if address else 0,
            key=key,
            temp_dir=str(folder),
        )
        self._child: asyncio.subprocess.Process | None = None

    async def start(self, plan: FleetPlan) -> Launched:
        with open(self._folder / "launcher.log", "ab") as errors:
            child = self._child = await asyncio.create_subprocess_exec(
                *module("fleet.on_ray.launch"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env=os.environ | {PARENT_VARIABLE: str(os.getpid())},
                start_new_session=True,  # Ctrl-C in a terminal is for the fleet, which ends it in order
            )
        assert child.stdin is not None
        child.stdin.write(encode(msgspec.structs.replace(self._order, plan=plan)) + b"\n")
        answer = await self._answer(child)
        if isinstance(answer, Trouble):
            raise CannotStart(answer.message)
        return Launched(answer.controller, answer.logs, answer.found)

    async def failed(self) -> str:
        child = self._child
        assert child is not None, "it was not started"
        if not self._local and await child.wait() == 0:  # it has done its work
            await asyncio.get_running_loop().create_future()
        answer = await self._answer(child)
        return answer.message if isinstance(answer, Trouble) else "Ray's launcher said what nobody asked for"

    async def _answer(self, child: asyncio.subprocess.Process) -> RayLaunched | Trouble:
        assert child.stdout is not None
        try:
            return decode_answer.decode(await child.stdout.readuntil(b"\n"))
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, msgspec.MsgspecError):
            status = await child.wait()
            words = (self._folder / "launcher.log").read_text(errors="replace").splitlines()[-LAST_LINES:]
            return Trouble(
                message="\n  | ".join([f"Ray's launcher ended with status {status}; its last words:", *words])
            )

    async def close(self) -> None:
        child = self._child
        if child is None:
            return
        assert child.stdin is not None
        child.stdin.close()
        try:
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await child.wait()
        except TimeoutError:
            self.clean = False
            self.kill()
            await child.wait()

    def kill(self) -> None:
        """Whatever Ray has started here is gone with it; in a cluster the fleet goes on ending by itself."""
        if self._child is not None and self._child.returncode is None:
            self._child.kill()
