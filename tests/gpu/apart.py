"""Jobs in processes of their own: one that crashes the device, or hangs, does not affect the others.

They are forked, so earlier imports are available at once. The parent must not have used the device, nor computed with
torch: neither survives a fork.
"""

import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, NamedTuple, TypeAlias

from api.process.lifeline import die_with_parent

FORK = get_context("fork")

Say: TypeAlias = Callable[[Any], None]
Job: TypeAlias = Callable[[Say], None]


class Said(NamedTuple):
    what: Any


class Ended(NamedTuple):
    error: str  # empty: well


def last_line(error: str) -> str:
    """Last line of a traceback: the error itself."""
    return (error.strip().splitlines() or [""])[-1]


class Running(NamedTuple):
    number: int
    process: ForkProcess
    pipe: "Connection[Any, Any]"

    def kill(self) -> None:
        """Kill the process and, if it leads a group, all that it started."""
        with suppress(ProcessLookupError, PermissionError):
            if os.getpgid(self.process.pid or 0) == self.process.pid:
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.pipe.close()


def apart(
    jobs: Sequence[Job], limit_s: float, at_once: int = 1, *, leads: bool = False
) -> Iterator[tuple[int, Said | Ended]]:
    """Yield each job's messages and its end, with its number; past the total limit, end the remaining jobs.

    With `leads` each job leads a group of processes, which are ended with it.
    """
    end_s = time.monotonic() + limit_s
    pending = list(enumerate(jobs))[::-1]
    running: list[Running] = []
    try:
        while pending or running:
            while pending and len(running) < at_once:
                running.append(_started(*pending.pop(), leads=leads))
            for pipe in wait([one.pipe for one in running], max(0.0, end_s - time.monotonic())):
                one = next(one for one in running if one.pipe is pipe)
                message = _heard(one)
                if isinstance(message, Ended):
                    running.remove(one)
                yield one.number, message
            if time.monotonic() >= end_s:
                left = [*(one.number for one in running), *(number for number, _ in reversed(pending))]
                for one in running:
                    one.kill()
                running.clear()
                pending.clear()
                yield from ((number, Ended(f"cut off after {limit_s:.0f} s")) for number in left)
    finally:
        for one in running:
            one.kill()


def _started(number: int, job: Job, *, leads: bool) -> Running:
    mine, its = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_run, args=(job, its, os.getpid(), leads))
    process.start()
    its.close()  # else the pipe would not end when the process does
    return Running(number, process, mine)


def _run(job: Job, pipe: "Connection[Any, Any]", parent_pid: int, leads: bool) -> None:
    if leads:
        os.setsid()
    die_with_parent(parent_pid)
    try:
        job(lambda what: pipe.send(Said(what)))
        pipe.send(Ended(""))
    except Exception:  # any error is reported, and the next job runs
        pipe.send(Ended(traceback.format_exc()))


def _heard(one: Running) -> Said | Ended:
    try:
        message: Said | Ended = one.pipe.recv()
    except EOFError:
        one.process.join()
        message = Ended(f"its process died with status {one.process.exitcode}")
    if isinstance(message, Ended):
        one.kill()
    return message
