"""A `warmroute replica` as a child process: its command, its log, and its ready line."""

import asyncio
import errno
import os
import re
import signal
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from api.process.lifeline import PARENT_VARIABLE, current_folder
from fleet.host.report import ReplicaAddress

LAST_LINES = 12
TAIL_BYTES = 16 * 1024
MAX_BYTES = 4 * 1024 * 1024
LONGEST_LOG_BYTES = 64 * 1024 * 1024
READY_LINE = re.compile(  # `replica.server.ready_line` makes it
    r"^ready on (http://\S+:\d+), model (.*), \d+ blocks of \d+,(?: attention \S+,)? events (\S+)$", re.MULTILINE
)
LOG_ENCODING = "utf-8:backslashreplace"  # independent of this process's terminal


def open_log(path: Path, flags: int) -> int:
    """Open or make a log for this user alone; OSError for a link, a pipe, or somebody else's file."""
    descriptor = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
        return descriptor
    os.close(descriptor)
    raise PermissionError(errno.EPERM, "it is no file of this user", str(path))


class Log:
    """A log file, written and read through one descriptor: it may be removed meanwhile."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = open_log(path, os.O_RDWR | os.O_APPEND)

    @property
    def size(self) -> int:
        return os.fstat(self.descriptor).st_size

    def shorten(self) -> None:
        """Rotate a log that is too long: its content moves to PATH.1.

        It is cut in place, since its writer has it open; a line written at that moment may be lost.
        """
        if self.size <= LONGEST_LOG_BYTES:
            return
        # A removed folder, a full disk, or something of another user's in its place.
        with suppress(OSError), open(open_log(Path(f"{self.path}.1"), os.O_WRONLY), "wb") as before:
            before.truncate()
            while sent := os.sendfile(before.fileno(), self.descriptor, before.tell(), 2**30):
                before.seek(sent, os.SEEK_CUR)
        os.ftruncate(self.descriptor, 0)

    def tail(self, begin: int) -> str:
        """Return what was written from `begin` on, or since the log was cut; the last part if that is long."""
        start = max(begin if begin <= self.size else 0, self.size - TAIL_BYTES)
        return os.pread(self.descriptor, TAIL_BYTES, start).decode(errors="replace")

    def last(self, lines: int) -> str:
        """The last lines, as far back as the bytes go that one may ask for."""
        start = max(0, self.size - MAX_BYTES)
        text = os.pread(self.descriptor, MAX_BYTES, start).decode(errors="replace")
        return "".join(text.splitlines(keepends=True)[-lines:]) if lines > 0 else ""

    @property
    def is_closed(self) -> bool:
        return self.descriptor < 0

    def close(self) -> None:
        """Close it; a second call does nothing, as the descriptor may be another file's."""
        if not self.is_closed:
            os.close(self.descriptor)
            self.descriptor = -1


@dataclass(frozen=True)
class Child:
    """A process in a new session that dies with this one."""

    process: asyncio.subprocess.Process
    log: Log
    log_begin: int

    @classmethod
    async def start(cls, command: Sequence[str], log: Log, environment: Mapping[str, str]) -> "Child":
        begin = log.size
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log.descriptor,
            stderr=asyncio.subprocess.STDOUT,
            env=os.environ | environment | {PARENT_VARIABLE: str(os.getpid()), "PYTHONIOENCODING": LOG_ENCODING},
            cwd=current_folder() or os.sep,  # hardly a program starts in a folder that is gone
            start_new_session=True,  # Ctrl-C in a terminal is for the fleet, which drains its front first
        )
        return cls(process, log, begin)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_over(self) -> bool:
        return self.process.returncode is not None

    def place(self) -> ReplicaAddress | None:
        """Return where it listens once it is ready; for our own replicas."""
        found = READY_LINE.search(self.output())
        if found is None:
            return None
        url, model, events = found.groups()
        return ReplicaAddress(url=url, model=model, events=None if events == "off" else events)

    async def ended(self) -> str:
        """Wait for the end, and say which it was."""
        status = await self.process.wait()
        if status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"ended with status {status}"

    def output(self) -> str:
        """Return this process's output, or the last part of it."""
        return self.log.tail(self.log_begin)

    def last_lines(self) -> list[str]:
        return self.output().splitlines()[-LAST_LINES:]

    def notes(self) -> list[str]:
        return [line for line in self.output().splitlines() if line.startswith("Note: ")]

    async def stop(self, limit_s: float) -> bool:
        """Ask it to drain and end; False if it had to be killed."""
        if not self.is_over:
            self.process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(limit_s):
                await self.process.wait()
        except TimeoutError:
            self.kill()
            await self.process.wait()
            return False
        return True

    def kill(self) -> None:
        """Kill the process and its children."""
        if not self.is_over:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
