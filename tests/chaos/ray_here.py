"""A `warmroute up` on its private Ray: its processes by role, steady requests, and streams."""

import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.events import processes as machinery
from tests.fleet.test_up import Up, starting
from tests.processes import family, of_process

SLOWLY_S = 60.0  # a Ray may take this long on a machine with other things to do


def wait_until(condition: Callable[[], object], what: str) -> None:
    machinery.wait_until(condition, what, SLOWLY_S)


class Victims:
    """The processes of one `warmroute up`, by role."""

    def __init__(self, running: Up) -> None:
        self._up = running.process.pid

    def of(self, word: str) -> list[int]:
        return [pid for pid in family(self._up) if word in of_process(pid, "cmdline").replace(b"\0", b" ").decode()]

    def one(self, word: str) -> int:
        [pid] = self.of(word)
        return pid


@contextmanager
def up(*arguments: str, **environment: str) -> Iterator[Up]:
    with starting("--port", "0", *arguments, **environment) as running:
        running.wait_for("Ctrl-C ends everything", within_s=SLOWLY_S)
        yield running


class Load:
    """Short requests, one after the other, until it is ended."""

    def __init__(self, running: Up) -> None:
        self.failed: list[str] = []
        self.asked = 0
        self.answered_s: list[float] = []  # when
        self._running = running
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self) -> None:
        while not self._ending.wait(0.02):
            self.asked += 1
            try:
                self._running.ask(max_tokens=1, within_s=SLOWLY_S)
            except urllib.error.HTTPError as error:
                self.failed.append(error.read().decode())
            except OSError as error:
                self.failed.append(repr(error))
            else:
                self.answered_s.append(time.monotonic())

    def end(self) -> None:
        self._ending.set()
        self._thread.join()


@contextmanager
def under_load(running: Up) -> Iterator[Load]:
    load = Load(running)
    try:
        wait_until(lambda: load.answered_s, "the load is answered")
        yield load
    finally:
        load.end()


class Stream:
    """A stream that runs during a fault; `said` is the text that the client has received."""

    def __init__(self, running: Up, tokens: int) -> None:
        self.said = b""
        body = {"model": "demo", "prompt": "Once", "max_tokens": tokens, "ignore_eos": True, "stream": True}
        request = urllib.request.Request(running.url + "/v1/completions", json.dumps(body).encode())
        self._answer = urllib.request.urlopen(request, timeout=60)
        self._thread = threading.Thread(target=self._hear)
        self._thread.start()
        wait_until(lambda: b"data:" in self.said, "it runs")

    def _hear(self) -> None:
        with self._answer:
            for line in self._answer:
                self.said += line

    def end(self) -> bytes:
        self._thread.join()
        return self.said


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
