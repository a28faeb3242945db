"""Runs the tools as people do: in a pseudo-terminal."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tests.events.processes import DEADLINE_S

# Ctrl-C signals the processes that the terminal controls.
CONTROLLED = """
import fcntl, sys, termios
from fleet.cli import main
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
main(sys.argv[1:])
"""


class Terminal:
    """`warmroute ...` in a terminal of its own."""

    def __init__(self, arguments: tuple[str, ...], size: tuple[int, int], environment: dict[str, str]) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
        self.before = termios.tcgetattr(theirs)
        self.theirs = theirs
        self.process = subprocess.Popen(
            [sys.executable, "-c", CONTROLLED, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env=os.environ | {"TERM": "xterm-256color"} | environment,
        )
        self.written = b""

    def read_until(self, text: bytes) -> None:
        while text not in self.written:
            ready, _, _ = select.select([self._ours], [], [], DEADLINE_S)
            assert ready, f"{text!r} was not written; the output ends with {self.written[-500:]!r}"
            self.written += os.read(self._ours, 65536)

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def end(self) -> int:
        """Read the remaining output first: a process that writes to a full terminal blocks."""
        while self.process.poll() is None:
            if select.select([self._ours], [], [], 0.05)[0]:
                self.written += os.read(self._ours, 65536)
        while select.select([self._ours], [], [], 0)[0]:
            self.written += os.read(self._ours, 65536)
        return self.process.returncode

    def close(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self.theirs)


@contextmanager
def terminal(*arguments: str, size: tuple[int, int] = (80, 24), **environment: str) -> Iterator[Terminal]:
    running = Terminal(arguments, size, environment)
    try:
        yield running
    finally:
        running.close()
