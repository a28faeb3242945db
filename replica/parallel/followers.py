"""The other ranks of an engine, as its own process sees them: its children.

They end with it, however it ends. If one of them ends by itself, the engine does too, at once: nothing can be computed
without it, and the engine may be waiting for it in a collective.
"""

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, NoReturn

from replica.config import EngineConfig
from replica.parallel.messages import Failed, Join, Start, ToFollower, encode, receive_answer

log = logging.getLogger(__name__)

ENDING_LIMIT_S = 5.0


class Follower(NamedTuple):
    rank: int
    process: subprocess.Popen[bytes]
    channel: "Connection[bytes, bytes]"


class Followers:
    def __init__(self, config: EngineConfig, kv_descriptor: int) -> None:
        """Start them; they begin to load their shares of the model."""
        self._size = config.tensor_parallel_size
        self._ending = False
        self._watches: list[threading.Thread] = []
        self._followers: list[Follower] = []
        try:
            for rank in range(1, self._size):
                self._followers.append(_started(rank, kv_descriptor))
            for follower in self._followers:
                follower.channel.send_bytes(encode(Start(config, follower.rank)))
        except OSError:
            self.kill()
            raise

    @property
    def pids(self) -> list[int]:
        return [follower.process.pid for follower in self._followers]

    def meet(self, join: Callable[[Path], None]) -> None:
        """Have all ranks connect to each other; `join` does so for this one. From now on a death ends the engine."""
        for follower in self._followers:
            watch = threading.Thread(target=self._watch, args=[follower], daemon=True)
            watch.start()
            self._watches.append(watch)
        folder = tempfile.mkdtemp(prefix="warmroute-ranks-")  # 0700: nobody else can join
        try:
            self.tell(Join(folder))
            join(Path(folder))
            self.wait_ready()
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def tell(self, message: ToFollower) -> None:
        raw = encode(message)
        for follower in self._followers:
            follower.channel.send_bytes(raw)

    def give_up(self, error: ConnectionError) -> NoReturn:
        """End this process, since a rank cannot be reached."""
        time.sleep(ENDING_LIMIT_S)  # if one has died, its watch says so meanwhile, and ends this process
        log.error("the engine's %d ranks do not reach each other: %s", self._size, error)
        os._exit(1)

    def close(self) -> None:
        """End them, and wait for it."""
        self._ending = True
        for follower in self._followers:
            follower.channel.close()
        deadline_s = time.monotonic() + ENDING_LIMIT_S
        for follower in self._followers:
            try:
                follower.process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.warning("rank %d of %d did not end by itself", follower.rank, self._size)
                follower.process.kill()
                follower.process.wait()
        for watch in self._watches:
            watch.join()

    def kill(self) -> None:
        """End them while they load, when they hear nothing."""
        for follower in self._followers:
            follower.process.kill()
        self.close()

    def wait_ready(self) -> None:
        """Wait until each has done what it was last told. ValueError, OSError: one of them cannot, or has died."""
        for follower in self._followers:
            try:
                answer = receive_answer(follower.channel)
            except (EOFError, ConnectionError) as error:
                raise OSError(self._ended(follower, follower.process.wait())) from error
            if isinstance(answer, Failed):
                raise ValueError(answer.message)

    def _watch(self, follower: Follower) -> None:
        status = follower.process.wait()
        if not self._ending:
            log.error("%s", self._ended(follower, status))
            os._exit(1)

    def _ended(self, follower: Follower, status: int) -> str:
        how = f"signal {-status}" if status < 0 else f"status {status}"
        return f"the engine's rank {follower.rank} of {self._size} died ({how})"


def _started(rank: int, kv_descriptor: int) -> Follower:
    ours, theirs = Pipe()
    with theirs:
        # The child sees the current folder as a place of modules only if this process does.
        safe = [] if "" in sys.path or os.getcwd() in sys.path else ["-P"]
        given = [str(theirs.fileno()), str(kv_descriptor), str(os.getpid())]
        process = subprocess.Popen(
            [sys.executable, *safe, "-m", "replica.parallel.follower", *given],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno(), kv_descriptor],
        )
    return Follower(rank, process, ours)
