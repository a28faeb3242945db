"""One `warmroute replica` as a child process: its command, its log, and what it says when it is ready."""

import asyncio
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from replica.cli import PARENT_VARIABLE

LAST_LINES = 12
TAIL_BYTES = 16 * 1024
LOOK_INTERVAL_S = 0.05


class Addresses(NamedTuple):
    """Where a ready replica listens."""

    host: str
    port: int
    events: str | None


class Died(Exception):
    """The process ended by itself."""


class Child:
    """A process that dies with this one, however this one ends."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path, log_begin: int) -> None:
        self.name = name
        self._process = process
        self._log = log
        self._log_begin = log_begin

    @classmethod
    async def start(cls, name: str, command: Sequence[str], log: Path) -> "Child":
        # A session of its own: Ctrl-C in a terminal is for the fleet, which drains its front first.
        with log.open("ab") as output:
            begin = output.tell()
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                env=os.environ | {PARENT_VARIABLE: str(os.getpid())},
                start_new_session=True,
            )
        return cls(name, process, log, begin)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ready(self) -> Addresses:
        """Wait until it says where it listens."""
        while True:
            addresses = read_addresses(self.output())
            if addresses is not None:
                return addresses
            if self._process.returncode is not None:
                raise Died(self.ending)
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def ended(self) -> str:
        """Wait for the end, and say which it was."""
        await self._process.wait()
        return self.ending

    @property
    def ending(self) -> str:
        status = self._process.returncode
        assert status is not None, "it runs still"
        if status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"ended with status {status}"

    def output(self) -> str:
        """What this process has written to its log, or the last part of it."""
        with self._log.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_begin, size - TAIL_BYTES))
            return log.read().decode(errors="replace")

    def last_lines(self) -> list[str]:
        return self.output().splitlines()[-LAST_LINES:]

    async def stop(self, limit_s: float) -> bool:
        """Ask it to drain and end; False if it had to be killed."""
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(limit_s):
                await self._process.wait()
        except TimeoutError:
            self.signal(signal.SIGKILL)
            await self._process.wait()
            return False
        return True

    def signal(self, number: int) -> None:
        if self._process.returncode is None:
            self._process.send_signal(number)


def read_addresses(output: str) -> Addresses | None:
    """Find the line that `replica.server.ready_line` makes."""
    found = re.search(r"^ready on http://(\S+):(\d+),.* events (\S+)$", output, re.MULTILINE)
    if found is None:
        return None
    host, port, events = found.groups()
    return Addresses(host.strip("[]"), int(port), None if events == "off" else events)
