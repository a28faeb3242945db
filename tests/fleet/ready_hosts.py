"""Hosts whose replicas are ready at once, and are no processes."""

import asyncio
import time
import uuid

import msgspec

from events.native import Load
from fleet.control.hosts import Host, HostGone
from fleet.host.report import ReplicaAddress, Report
from fleet.plan import Task


class ReadyHosts:
    """Those of a model named "broken" always fail."""

    def __init__(self, broken: str = "") -> None:
        self.broken = broken  # the name of one that cannot be begun
        self.speak = asyncio.Event()  # until then no report comes
        self.speak.set()
        self.hosts: dict[str, ReadyHost] = {}

    def begin(self, task: Task) -> Host:
        if task.name == self.broken:
            raise OSError(28, "No space left on device")
        host = self.hosts.get(task.name)
        if host is None or host.over.is_set():
            host = self.hosts[task.name] = ReadyHost(self, task, len(self.hosts))
        return host

    async def there(self) -> list[str]:
        return [name for name, host in self.hosts.items() if not host.over.is_set()]

    async def missing(self, task: Task) -> str | None:  # noqa: ARG002
        return None

    def kill(self) -> None: ...


class ReadyHost:
    def __init__(self, hosts: ReadyHosts, task: Task, number: int) -> None:
        self.over = asyncio.Event()
        self._hosts = hosts
        self._log = f"{task.name} says\nthat it is there\n"
        url = f"http://127.0.0.1:{number + 1}"
        self._report = Report(
            name=task.name,
            host=uuid.uuid4().hex,
            life="ready",
            since=time.time(),
            place=ReplicaAddress(url=url, model=task.plan.name, incarnation=uuid.uuid4().hex),
            node="127.0.0.1",
            pid=100_000 + number,
            starts=1,
            load=Load(running=1, free_blocks=750, cached_blocks=500),
            total_blocks=1000,
            block_size=16,
            measured_at=time.time(),
            last_words=("--api-key abc",),
            notes=("Note: abc",),
        )
        if task.plan.model == "broken":
            failed = {"life": "failing", "why": "ended with status 1", "place": None, "last_words": ("no such model",)}
            self._report = msgspec.structs.replace(self._report, **failed)

    async def report(self, after: tuple[str, int] | None) -> Report:
        await self._hosts.speak.wait()
        if after is not None:
            await self.over.wait()
        if self.over.is_set():
            raise HostGone("it has ended")
        return self._report

    async def stop(self, limit_s: float) -> None:  # noqa: ARG002
        self.over.set()

    async def log(self, lines: int) -> str:
        return "".join(self._log.splitlines(keepends=True)[-lines:])
