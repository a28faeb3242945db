"""Nothing of a local Ray outlives its launcher: what is in the launcher's session is its, and is killed when it ends.

Two of Ray's processes would otherwise linger for half a minute when the others are killed.
"""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

LOOK_S = 0.02
LIMIT_S = 10.0


class Process(NamedTuple):
    pid: int
    state: str
    parent: int
    session: int


def lead_a_session() -> int:
    """Start a new session for all later children; return its id."""
    if os.getsid(0) != os.getpid():
        os.setsid()
    return os.getsid(0)


def processes() -> list[Process]:
    found = []
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        with suppress(OSError):  # it has ended meanwhile
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
            state, parent, _, session = stat.rpartition(")")[2].split()[:4]
            found.append(Process(pid, state, int(parent), int(session)))
    return found


def kill_session(session: int, but: int = 0) -> None:
    """Kill a session's processes until none is left; meanwhile its number cannot be reused."""
    end_s = time.monotonic() + LIMIT_S
    while time.monotonic() < end_s:
        living = [each.pid for each in processes() if each.session == session and each.pid != but and each.state != "Z"]
        if not living:
            return
        for pid in living:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_S)


def clear_orphans(session: int) -> None:
    """Kill the rest of a session whose leader was reaped; one with a leader is a new session."""
    if all(each.pid != session for each in processes()):
        kill_session(session)


def watch_over(session: int) -> None:
    """Start a process that does nothing but wait for the end of this one, however it ends, and then clear its session.

    To be called before there are threads.
    """
    reading, writing = os.pipe()
    if child := os.fork():
        os.close(reading)  # `writing` stays open until the end of this process, and of no other
        os.waitpid(child, 0)
        return
    os.setsid()
    if os.fork():  # twice, so that no zombie is left here
        os._exit(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.close(writing)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    os.read(reading, 1)
    kill_session(session)
    os._exit(0)
