"""What the controller asks of a place that runs replicas: this machine's processes, or Ray's actors."""

from typing import Protocol

from fleet.host.report import Report
from fleet.plan import Task


class HostLost(Exception):
    """The host of a replica does not answer, and may be on its way back; the message says what is known."""


class HostGone(Exception):
    """There is no such host any more, and none comes back by itself."""


class Host(Protocol):
    """One replica's. Every method may raise HostLost or HostGone."""

    async def report(self, after: tuple[str, int] | None) -> Report:
        """What is so; if that is still `after` (host, version), when it changes, or after some seconds."""
        ...

    async def stop(self, limit_s: float) -> None:
        """Have the replica drain for so long at most, and end; returns when its process and the host are gone."""
        ...

    async def replace(self, why: str) -> None:
        """Kill the replica's process, so that another one is started."""
        ...

    async def log(self, lines: int) -> str:
        """The last lines of the replica's log."""
        ...


class Hosts(Protocol):
    def begin(self, task: Task) -> Host:
        """A host that starts this replica and keeps it running; one of that name is taken over if it is there."""
        ...

    async def there(self) -> list[str]:
        """The names of the hosts that there are, also those that an earlier controller began."""
        ...

    async def missing(self, task: Task) -> str | None:
        """Why a host that does not report may not have been placed yet: what its node would need to have."""
        ...
