"""Runs the tools as users do: in processes of their own, ended by signals."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

FREE = "tcp://127.0.0.1:0"
DEADLINE_S = 50.0  # none of what is awaited takes this long, whatever else the machine does


def wait_until(condition: Callable[[], object], what: str = "it happens", within_s: float = DEADLINE_S) -> None:
    end_s = time.monotonic() + within_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < end_s, f"timed out after {within_s:g} s: {what}"
        pause.wait(0.01)


class Tool:
    """A running `warmroute events ... --json`, its output read as it comes."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, "-m", "fleet", "events", *map(str, arguments), "--json"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.out: list[str] = []
        self.err: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=(stream, lines))
            for stream, lines in ((self.process.stdout, self.out), (self.process.stderr, self.err))
        ]
        for reader in self._readers:
            reader.start()

    @staticmethod
    def _read(stream: Any, lines: list[str]) -> None:
        lines.extend(iter(stream.readline, ""))

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in list(self.out)]

    def wait_for(self, condition: Callable[[list[dict[str, Any]]], object], what: str) -> None:
        """Waits until the JSON lines so far are as wanted."""
        wait_until(lambda: condition(self.lines()) or self.process.poll() is not None, what)
        assert condition(self.lines()), (what, self.out[-3:], self.err)

    def end(self, number: int | None = signal.SIGINT) -> int:
        """Sends the signal, or waits for the natural end; returns the exit status."""
        if number is not None:
            self.process.send_signal(number)
        status = self.process.wait(timeout=DEADLINE_S)
        for reader in self._readers:
            reader.join()
        return status


@contextmanager
def tool(*arguments: object) -> Iterator[Tool]:
    running = Tool(*arguments)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
        running.end(None)
        for stream in (running.process.stdout, running.process.stderr):
            assert stream is not None
            stream.close()
