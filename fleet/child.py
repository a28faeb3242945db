"""One `warmroute replica` as a child process: its command, its log, and what it says when it is ready."""

import asyncio
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from api.lifeline import PARENT_VARIABLE

LAST_LINES = 12
TAIL_BYTES = 16 * 1024
LOOK_INTERVAL_S = 0.05
LOG_ENCODING = "utf-8:backslashreplace"  # whatever the terminal of this process takes


class Ready(NamedTuple):
    """Where a ready replica listens, and the model that it serves."""

    host: str
    port: int
    events: str | None
    model: str

    @property
    def url(self) -> str:
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"


class Died(Exception):
    """The process ended by itself."""


class Log:
    """A file that is written and read through one descriptor, so that it outlives its name: folders are tidied up."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    @property
    def size(self) -> int:
        return os.fstat(self.descriptor).st_size

    def tail(self, begin: int) -> str:
        """What was written from here on, or the last part of it."""
        start = max(begin, self.size - TAIL_BYTES)
        return os.pread(self.descriptor, TAIL_BYTES, start).decode(errors="replace")

    def close(self) -> None:
        os.close(self.descriptor)


class Child:
    """A process that dies with this one, however this one ends."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Log, log_begin: int) -> None:
        self.name = name
        self._process = process
        self._log = log
        self._log_begin = log_begin

    @classmethod
    async def start(cls, name: str, command: Sequence[str], log: Log) -> "Child":
        begin = log.size
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log.descriptor,
            stderr=asyncio.subprocess.STDOUT,
            env=os.environ | {PARENT_VARIABLE: str(os.getpid()), "PYTHONIOENCODING": LOG_ENCODING},
            start_new_session=True,  # Ctrl-C in a terminal is for the fleet, which drains its front first
        )
        return cls(name, process, log, begin)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ready(self) -> Ready:
        """Wait until it says that it is."""
        while True:
            ready = read_ready_line(self.output())
            if ready is not None:
                return ready
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
        return self._log.tail(self._log_begin)

    def last_lines(self) -> list[str]:
        return self.output().splitlines()[-LAST_LINES:]

    def notes(self) -> list[str]:
        """What it says about its settings."""
        return [line for line in self.output().splitlines() if line.startswith("Note: ")]

    def lost_its_ports(self) -> bool:
        """Whether it ended because somebody else took the ports of its events first."""
        return re.search(r"cannot bind tcp://\S+: Address already in use", self.output()) is not None

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


READY_LINE = re.compile(
    r"^ready on http://(\S+):(\d+), model (.*), \d+ blocks of \d+,(?: attention \S+,)? events (\S+)$", re.MULTILINE
)


def read_ready_line(output: str) -> Ready | None:
    """Find the line that `replica.server.ready_line` makes."""
    found = READY_LINE.search(output)
    if found is None:
        return None
    host, port, model, events = found.groups()
    return Ready(host.strip("[]"), int(port), None if events == "off" else events, model)
