"""The actor of one replica: it has the replica as its child, keeps it running and reports.

Arguments and results of our own types are bytes: the actor may be older than its caller.
"""

import asyncio
import logging
import os
import traceback
from collections.abc import Awaitable

import msgspec

from fleet.host.child import Log
from fleet.host.report import Report
from fleet.host.supervisor import Supervisor
from fleet.on_ray.cluster import log_folder, node_address
from fleet.on_ray.settings import environment_of, not_for_children
from fleet.plan import Task

log = logging.getLogger(__name__)

PAUSE_S = 1.0  # before Ray restarts an actor that a bug has ended

encode_task = msgspec.json.Encoder().encode
encode_report = msgspec.json.Encoder().encode
decode_report = msgspec.json.Decoder(Report).decode
_decode_task = msgspec.json.Decoder(Task).decode


class Replica:
    """Ray's tools show the name of this class, and that of the actor: the replica's."""

    def __init__(self, task: bytes) -> None:
        for name in not_for_children(os.environ, environment_of(os.getppid())):
            del os.environ[name]
        decoded = _decode_task(task)
        self._log = Log(log_folder() / f"warmroute-{decoded.name}.log")
        self._supervisor = Supervisor(decoded, node_address(), self._log)
        self._running = asyncio.get_running_loop().create_task(crash_on_bug(self._supervisor.run()))

    async def report(self, after: tuple[str, int] | None) -> bytes:
        return encode_report(await self._supervisor.report(after))

    async def stop(self, limit_s: float) -> None:
        await self._supervisor.stop(limit_s)

    async def log(self, lines: int) -> str:
        return self._log.last(lines)


async def crash_on_bug(work: Awaitable[None]) -> None:
    """Do an actor's work; a bug ends its process with a traceback, and Ray starts another one that goes on."""
    try:
        await work
    except Exception:
        log.exception("a mistake of warmroute's")
        traceback.print_exc()
        await asyncio.sleep(PAUSE_S)
        os._exit(1)
