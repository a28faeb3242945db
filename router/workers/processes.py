"""The processes of a router with several workers: started, watched, replaced and ended together.

This process serves nothing. Each worker is a fork of it that listens at the same port, by a socket of its own: among
these the kernel divides new connections. When a worker dies, its socket is closed, and the kernel leaves it out until
another worker listens in its place: a death costs only the connections that it had.

A worker says again and again that it is alive, and how busy. One that hangs, by a fault of ours or by a signal, is
killed. Each worker more follows all events once more and makes every request dearer, so one may begin alone: the next
starts when all are busy and the machine has processors to spare.
"""

import gc
import logging
import mmap
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple, NoReturn, TypeAlias

from api.http.server import hold
from api.process.lifeline import die_with_parent
from api.process.own_folder import OwnFolder
from router.tenants.shared_limits import SharedLimits
from router.workers.ring import RING_BYTES, Ring

log = logging.getLogger(__name__)

REST_S = 1.0  # between two starts of the same worker
BEAT_S = 2.0  # between two times that a worker says that it is alive
BUSY, BUSY_BEATS = 90, 2  # a worker is busy after this many beats with this much of a processor, in percent
IDLE_CPUS = 0.8  # another worker has to find this much of the machine's processors idle
HUNG_S = 30.0  # after this long without a word its clients wait in vain
MAX_BEATS = 4096  # read at once
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)


class Place(NamedTuple):
    """A worker's place among the others, told at its start."""

    number: int
    workers: int  # the most that there may be
    serving: mmap.mmap  # its one byte says how many there are now
    folder: Path  # the sockets between them lie there; only this user may enter it
    usage: SharedLimits
    ring: Ring
    joins: bool  # others that serve: they know what it has to know


# The last is called when it listens, and again and again while it is alive: with the percent of a processor it took.
Serve: TypeAlias = Callable[[Place, socket.socket, Callable[[int], None]], int]


@dataclass(slots=True, eq=False)
class Worker:
    number: int
    listener: socket.socket
    pid: int = 0  # 0: it does not run
    started_s: float = 0.0
    starts: int = 0
    say: int | None = None  # the end of a pipe: it says that it listens, and lives
    heard_s: float = 0.0
    listens: bool = False
    busy_beats: int = 0  # the last ones, in a row


class Processes:
    """`serve` is called in each worker; what it returns is the worker's exit status.

    `first`: so many start at once, and the others when these are busy; None: all.
    """

    def __init__(
        self,
        host: str,
        port: int,
        count: int,
        serve: Serve,
        first: int | None = None,
        hung_s: float = HUNG_S,
        idle_cpus: Callable[[], float] | None = None,
    ) -> None:
        self._host = host
        self._port = port
        self._serve = serve
        self._hung_s = hung_s
        self._looked_s = 0.0  # the last look for workers that hang
        self._count = count
        self._wanted = count if first is None else first
        self._serving = mmap.mmap(-1, 1)
        self._serving[0] = self._wanted
        self._idle_cpus = idle_cpus or IdleCpus().lately
        self._is_ready = False  # all that were to start first have begun to listen
        self._workers: list[Worker] = []
        self._asked = 0  # how often it was asked to end
        self._status = 0

    def run(self, on_ready: Callable[[socket.socket], None]) -> int:
        """Run until told to end, and return the exit status; `on_ready` is called when all listen.

        Raise OSError if the port cannot be had.
        """
        with (
            closing(OwnFolder("warmroute-router-")) as own,
            TemporaryFile(dir=own.path) as lock,
            selectors.DefaultSelector() as self._selector,
            self._signals(),
        ):
            self._folder, self._pid = own.path, os.getpid()
            self._usage, self._rings = SharedLimits(self._count, lock), mmap.mmap(-1, self._count * RING_BYTES)
            for number in range(self._count):
                listener = hold(self._host, self._port, first=not number)
                self._port = listener.getsockname()[1]
                self._workers.append(Worker(number, listener))
            gc.collect()
            gc.freeze()  # pages with what is there now stay those of all workers
            while any(worker.pid for worker in self._workers) or not self._asked:
                self._grow()
                wait_s = self._start_missing()
                if not self._is_ready and all(worker.listens for worker in self._wanted_workers):
                    self._is_ready = True
                    on_ready(self._workers[0].listener)
                self._kill_hung()
                self._wait(wait_s)
        return self._status

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Have signals end a wait of the selector."""
        reading, writing = socket.socketpair()
        with reading, writing:
            for end in (reading, writing):
                end.setblocking(False)
            self._reading, self._writing = reading, writing
            self._selector.register(reading, selectors.EVENT_READ)
            before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
            signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
            try:
                yield
            finally:
                signal.set_wakeup_fd(-1)
                for number, handler in before.items():
                    signal.signal(number, handler)

    @property
    def _wanted_workers(self) -> list[Worker]:
        return self._workers[: self._wanted]

    def _grow(self) -> None:
        """Want one more worker if all are busy, and the machine could run it."""
        running = self._wanted_workers
        if len(running) == self._count or self._asked or self._idle_cpus() < IDLE_CPUS:
            return
        if all(worker.listens and worker.busy_beats >= BUSY_BEATS for worker in running):
            for worker in running:
                worker.busy_beats = 0
            self._wanted += 1
            log.info("all workers are busy; starting worker %d", len(running))

    # ---- one worker

    def _kill_hung(self) -> None:
        """End the workers that say nothing any more; another one takes their place."""
        now_s = time.monotonic()
        if now_s - self._looked_s > self._hung_s / 2:  # this process stood still, and so may have all
            for worker in self._workers:
                worker.heard_s = now_s
        self._looked_s = now_s
        for worker in self._workers:
            if worker.listens and not self._asked and now_s - worker.heard_s > self._hung_s:
                who = worker.number, worker.pid
                log.warning("worker %d (process %d) has hung for %.0f s; killing it", *who, self._hung_s)
                worker.heard_s = now_s
                os.kill(worker.pid, signal.SIGKILL)

    def _work(self, worker: Worker, say: int) -> NoReturn:
        """The child's life. Nothing that the parent has begun must end here."""
        status = 1
        try:
            os.setpgid(0, 0)  # Ctrl-C reaches the parent, which passes it on
            die_with_parent(self._pid)
            signal.set_wakeup_fd(-1)
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            self._selector.close()
            for other in self._workers:
                if other is not worker:
                    other.listener.close()
            self._usage.begin(worker.number)
            shared = self._serving, self._folder, self._usage, Ring(self._rings, self._count, worker.number)
            place = Place(worker.number, self._count, *shared, self._is_ready)
            os.set_blocking(say, False)

            def say_alive(percent: int) -> None:
                with suppress(BlockingIOError):  # nobody has read for a day
                    os.write(say, bytes([percent]))

            status = self._serve(place, worker.listener, say_alive)
        except KeyboardInterrupt:
            pass
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _start_missing(self) -> float | None:
        """Start workers, also those that have ended and rested; return the seconds until the next one may start."""
        if self._asked:
            return None
        waits = []
        for worker in self._wanted_workers:
            if not worker.pid:
                left_s = worker.started_s + REST_S - time.monotonic() if worker.starts else 0.0
                if left_s > 0:
                    waits.append(left_s)
                    continue
                heard, say = os.pipe()
                worker.pid = os.fork()
                if not worker.pid:
                    os.close(heard)
                    self._work(worker, say)
                os.close(say)
                worker.started_s, worker.starts, worker.say = time.monotonic(), worker.starts + 1, heard
                self._selector.register(heard, selectors.EVENT_READ, worker)
        return min(waits, default=None)

    # ---- what happens

    def _wait(self, seconds: float | None) -> None:
        most_s = self._hung_s / 4
        for key, _ in self._selector.select(most_s if seconds is None else min(seconds, most_s)):
            worker: Worker | None = key.data
            if worker is None:
                for number in self._reading.recv(4096):
                    if number != signal.SIGCHLD:
                        self._end()
                        continue
                    for ended in self._workers:
                        if ended.pid:
                            pid, status = os.waitpid(ended.pid, os.WNOHANG)
                            if pid:
                                self._ended(ended, os.waitstatus_to_exitcode(status))
            elif worker.say is not None:  # else its end was reported first, by a signal
                if not (said := os.read(worker.say, MAX_BEATS)):
                    self._hang_up(worker)
                    continue
                worker.heard_s = time.monotonic()
                worker.busy_beats = worker.busy_beats + 1 if said[-1] >= BUSY else 0
                if not worker.listens:
                    worker.listens = True
                    if all(wanted.listens for wanted in self._wanted_workers):
                        self._serving[0] = self._wanted
                    if worker.starts > 1:
                        log.info("worker %d serves again, as process %d", worker.number, worker.pid)

    def _hang_up(self, worker: Worker) -> None:
        if worker.say is not None:
            self._selector.unregister(worker.say)
            os.close(worker.say)
            worker.say = None

    def _end(self) -> None:
        """Have all workers end; where none listens any longer, connections are refused."""
        self._asked += 1
        for worker in self._workers:
            worker.listener.close()
            if worker.pid:
                os.kill(worker.pid, signal.SIGTERM)

    def _ended(self, worker: Worker, status: int) -> None:
        pid, has_listened = worker.pid, worker.listens
        worker.pid, worker.listens = 0, False
        self._hang_up(worker)
        self._usage.ended(worker.number)
        if self._asked:
            self._status = self._status or abs(status)
            return
        if not (self._is_ready or has_listened) and status > 0:
            self._status = status  # it has said why it cannot start, and nor could another
            self._end()
            return
        held = hold(self._host, self._port, first=False)  # before the other is closed, so that nobody takes the port
        worker.listener.close()
        worker.listener = held
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        log.warning("worker %d (process %d) has ended %s; another one takes its place", worker.number, pid, how)


class IdleCpus:
    """The machine's idle processors, by what Linux counts; elsewhere all count as idle."""

    def __init__(self) -> None:
        self._idle_s, self._at_s, self._cpus = self._count_s(), time.monotonic(), 0.0

    def lately(self) -> float:
        idle_s, at_s = self._count_s(), time.monotonic()
        if at_s - self._at_s >= BEAT_S / 2:
            self._cpus = (idle_s - self._idle_s) / (at_s - self._at_s)
            self._idle_s, self._at_s = idle_s, at_s
        return self._cpus

    def _count_s(self) -> float:
        try:
            idle, waiting = Path("/proc/stat").read_text().split(maxsplit=6)[4:6]
        except (OSError, ValueError):
            return time.monotonic() * (os.cpu_count() or 1)
        return (int(idle) + int(waiting)) / os.sysconf("SC_CLK_TCK")
