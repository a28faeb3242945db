"""Starts the controller of `warmroute up`: in this process (`--no-ray`), or on Ray, by a child process."""

import asyncio
import math
import os
import socket
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit

import msgspec

from api.http.server import listen
from api.process.lifeline import PARENT_VARIABLE, module
from fleet.control.app import Serving
from fleet.control.controller import Controller, StateStore
from fleet.control.hosts import LocalHosts
from fleet.host.child import LAST_LINES, open_log
from fleet.on_ray.cleanup import clear_orphans, kill_session
from fleet.on_ray.orders import Launched, Order, Trouble, decode_answer, encode
from fleet.on_ray.settings import LOOPBACK
from fleet.plan import NO_MODELS, FleetPlan
from fleet.up.watching import CannotStart

START_LIMIT_S = 180.0  # the controller may take 60 of them
LOG = "launcher.log"
CLOSE_LIMIT_S = 15.0
LOCAL_TRIES = 5
AWAY_S = 10.0  # Ray restarts a controller within that time, mostly


class InThisProcess:
    """The controller and its processes, which end with this one."""

    holds = True  # the fleet ends with it
    retries: float = 0  # how often in a row a fleet that was lost may be begun again
    away_s = math.inf  # a controller that does not answer for this long is lost, with the fleet

    def __init__(self, logs: Path, key: str) -> None:
        self.hosts = LocalHosts(logs)
        self._logs = logs
        self._key = key
        self._serving: Serving | None = None

    @property
    def clean(self) -> bool:
        """True if everything ended in order."""
        return self.hosts.clean

    async def start(self, plan: FleetPlan, *, again: bool = False) -> Launched:
        """Start the fleet; with `again`, an existing controller keeps its plan."""
        assert not again, "it ends with this process"
        controller = Controller(self.hosts, StateStore())
        controller.want(plan)
        self._serving = Serving(controller, listen("127.0.0.1", 0), self._key)
        await self._serving.start()
        return Launched(controller=self._serving.url, logs=str(self._logs))

    async def failed(self) -> str:
        """Wait until the controller fails, and return the reason."""
        assert self._serving is not None, "it was not started"
        await self._serving.ended()
        await asyncio.get_running_loop().create_future()  # it was told to end: nothing has failed
        raise AssertionError

    async def close(self) -> None:
        if self._serving is not None:
            await self._serving.close()

    def kill(self) -> None:
        """Kill all processes of the fleet on this machine."""
        self.hosts.kill()


class OnRay:
    """A child process starts a Ray here and holds it, or joins the one at `address` and leaves the fleet there.

    The child is the driver, as Ray calls it, and not the process of the router: a driver dies with its head node.
    """

    def __init__(self, folder: Path, address: str | None, namespace: str, port: int, key: str) -> None:
        self.clean = True
        self._folder = folder
        self._local = address is None
        self.holds = self._local
        self.retries: float = LOCAL_TRIES if self._local else math.inf
        self.away_s = math.inf if self._local else AWAY_S
        # Every Ray's controller has the same port: the system gives it to nobody else, but a child can listen there.
        self._held = socket.socket() if self._local else None
        if self._held is not None:
            self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._held.bind((LOOPBACK, 0))
        self._order = Order(
            plan=NO_MODELS,
            address=address,
            namespace=namespace,
            port=self._held.getsockname()[1] if self._held else port,
            key=key,
            temp_dir=str(folder),
        )
        self._child: asyncio.subprocess.Process | None = None
        self._log_begin = 0  # the beginning of this child's part
        self._answered = False  # the child has begun the fleet

    async def start(self, plan: FleetPlan, *, again: bool = False) -> Launched:
        await self._clear()
        self._answered = False
        path = self._folder / LOG
        try:
            self._folder.mkdir(0o700, parents=True, exist_ok=True)  # it may have been removed meanwhile
            log = open_log(path, os.O_WRONLY | os.O_APPEND)
        except OSError as error:
            raise CannotStart(f"cannot write {str(path)!r}: {error.strerror}; choose another --log-dir") from error
        with open(log, "ab") as errors:
            self._log_begin = errors.tell()
            child = self._child = await asyncio.create_subprocess_exec(
                *module("fleet.on_ray.launch"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env=os.environ | {PARENT_VARIABLE: str(os.getpid())},
                start_new_session=True,  # Ctrl-C in a terminal is for the fleet, which ends it in order
            )
        assert child.stdin is not None
        child.stdin.write(encode(msgspec.structs.replace(self._order, plan=plan, again=again)) + b"\n")
        try:
            async with asyncio.timeout(START_LIMIT_S):
                answer = await self._answer(child)
        except TimeoutError as error:
            raise CannotStart(f"Ray did not start within {START_LIMIT_S:g} s") from error
        if isinstance(answer, Trouble):
            raise CannotStart(answer.message)
        self._answered = True
        self._order = msgspec.structs.replace(self._order, port=urlsplit(answer.controller).port or 0)
        return answer

    async def failed(self) -> str:
        child = self._child
        assert child is not None, "it was not started"
        if not self._local and await child.wait() == 0:  # it has done its work
            await asyncio.get_running_loop().create_future()
        answer = await self._answer(child)
        return answer.message if isinstance(answer, Trouble) else "Ray's launcher sent an unexpected answer"

    async def _answer(self, child: asyncio.subprocess.Process) -> Launched | Trouble:
        assert child.stdout is not None
        try:
            return decode_answer.decode(await child.stdout.readuntil(b"\n"))
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, msgspec.MsgspecError):
            status = await child.wait()
            lines = [f"Ray's launcher ended with status {status}; its last words:"]
            try:
                said = (self._folder / LOG).read_bytes()[self._log_begin :]
                lines += said.decode(errors="replace").splitlines()[-LAST_LINES:]
            except OSError as error:
                lines.append(f"none: {error.strerror}")
            return Trouble(message="\n  | ".join(lines))

    async def close(self) -> None:
        if (child := self._child) is not None:
            assert child.stdin is not None
            child.stdin.close()
            if self._local and not self._answered:
                self.kill()  # it only starts, and would first come to an end with that
            try:
                async with asyncio.timeout(CLOSE_LIMIT_S):
                    await child.wait()
            except TimeoutError:
                self.clean = False
            await self._clear()
        if self._held is not None:
            self._held.close()

    async def _clear(self) -> None:
        """See that nothing is left of the child, and of its Ray."""
        if (child := self._child) is None:
            return
        if not self._local:
            self.kill()
        elif child.returncode is None:  # not reaped, so its number is still its own
            await asyncio.to_thread(kill_session, child.pid)
        else:
            await asyncio.to_thread(clear_orphans, child.pid)
        await child.wait()
        self._child = None

    def kill(self) -> None:
        """Kill the launcher, and with it all that Ray has started here; a cluster's fleet keeps shutting down."""
        if self._child is not None and self._child.returncode is None:
            self._child.kill()


Launcher: TypeAlias = InThisProcess | OnRay
