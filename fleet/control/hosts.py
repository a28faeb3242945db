"""The interface to a place that runs replicas: processes of this machine, or Ray's actors."""

import asyncio
from pathlib import Path
from typing import Protocol

from fleet.host.child import Log
from fleet.host.report import Report
from fleet.host.supervisor import Supervisor
from fleet.plan import Task


class HostLost(Exception):
    """A replica's host does not answer, but may come back; the message gives the reason."""


class HostGone(Exception):
    """The host is gone for good."""


class Host(Protocol):
    """The host of one replica. Every method may raise HostLost or HostGone."""

    async def report(self, after: tuple[str, int] | None) -> Report:
        """Return the current report; if that is still `after` (host, version), wait for a change for some seconds."""

    async def stop(self, limit_s: float) -> None:
        """Drain the replica for `limit_s` at most, and end it; return when process and host are gone."""

    async def log(self, lines: int) -> str: ...


class Hosts(Protocol):
    def begin(self, task: Task) -> Host:
        """Return a host that starts this replica and keeps it running; take over one of that name."""

    async def there(self) -> list[str]:
        """Return the names of all hosts, including those of an earlier controller."""

    async def missing(self, task: Task) -> str | None:
        """Return the resource that no node has free for a silent host; None if one has it."""


ADDRESS = "127.0.0.1"


class LocalHosts:
    """Logs go to `folder`, one for each name; `clean` is whether every replica ended when it was asked to."""

    def __init__(self, folder: Path) -> None:
        self.clean = True
        self._folder = folder
        self._hosts: dict[str, _Host] = {}

    def begin(self, task: Task) -> Host:
        host = self._hosts.get(task.name)
        if host is None or host.is_over:
            host = self._hosts[task.name] = _Host(self, task, self._folder / f"{task.name}.log")
        return host

    async def there(self) -> list[str]:
        return list(self._hosts)

    async def missing(self, task: Task) -> str | None:  # noqa: ARG002
        return None

    def kill(self) -> None:
        for host in self._hosts.values():
            host.supervisor.kill()


class _Host:
    def __init__(self, hosts: LocalHosts, task: Task, log: Path) -> None:
        self._hosts = hosts
        self._log = Log(log)
        self.supervisor = Supervisor(task, ADDRESS, self._log)
        self._running = asyncio.create_task(self.supervisor.run())

    @property
    def is_over(self) -> bool:
        return self._running.done()

    async def report(self, after: tuple[str, int] | None) -> Report:
        if self.is_over:
            self._running.result()  # a mistake of ours ends the fleet, loudly
            raise HostGone("it has ended")
        return await self.supervisor.report(after)

    async def stop(self, limit_s: float) -> None:
        self._hosts.clean &= await self.supervisor.stop(limit_s)
        await asyncio.wait([self._running])  # `report` raises its error
        self._log.close()

    async def log(self, lines: int) -> str:
        if self._log.is_closed:
            raise HostGone("it has ended")
        return self._log.last(lines)
