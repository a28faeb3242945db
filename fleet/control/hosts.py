"""The interface to a place that runs replicas: processes of this machine, or Ray's actors."""

from typing import Protocol

from fleet.host.report import Report
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
