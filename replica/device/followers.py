"""The other ranks of an engine, as its own process sees them: its children.

They end with it, however it ends. If one of them ends by itself, the engine does too, at once: nothing can be computed
without it, and the engine may be waiting for it in a collective.
"""

import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NamedTuple, NoReturn, TypeVar

from msgspec import Struct

from api.process.lifeline import module
from replica.device.orders import Failed, encode

Answer = TypeVar("Answer")

log = logging.getLogger(__name__)

NOTICED_AFTER_S = 5.0


class Follower(NamedTuple):
    rank: int
    process: subprocess.Popen[bytes]
    channel: "Connection[bytes, bytes]"


class Followers:
    def __init__(self, program: str, starts: Sequence[Struct]) -> None:
        """Start a process for each rank after the first, by the name of its module, and send each its first message."""
        self._size = len(starts) + 1
        self._ending = threading.Event()
        self.patience_s = 0.0
        self._watches: list[threading.Thread] = []
        self._followers: list[Follower] = []
        try:
            for rank, start in enumerate(starts, start=1):
                ours, theirs = Pipe()
                with theirs:
                    process = subprocess.Popen(
                        module(program, str(theirs.fileno()), str(os.getpid())),
                        stdin=subprocess.DEVNULL,
                        pass_fds=[theirs.fileno()],
                    )
                follower = Follower(rank, process, ours)
                self._followers.append(follower)
                follower.channel.send_bytes(encode(start))
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [follower.process.pid for follower in self._followers]

    def answers(self, decode: Callable[[bytes], Answer | Failed]) -> list[Answer]:
        """Wait for an answer of each. ValueError, OSError: one of them has failed, or died."""
        answers = []
        for follower in self._followers:
            try:
                answer = decode(follower.channel.recv_bytes())
            except (EOFError, ConnectionError) as error:
                raise OSError(self._ended(follower, follower.process.wait())) from error
            if isinstance(answer, Failed):
                raise ValueError(answer.message)
            answers.append(answer)
        return answers

    def watch(self, patience_s: float = 0.0) -> None:
        """From now on a death ends the engine; after so long, in which a better reason may be found."""
        self.patience_s = patience_s
        for follower in self._followers:
            watch = threading.Thread(target=self._watch, args=[follower], daemon=True)
            watch.start()
            self._watches.append(watch)

    def tell(self, message: Struct) -> None:
        raw = encode(message)
        try:
            for follower in self._followers:
                follower.channel.send_bytes(raw)
        except ConnectionError as error:
            self.give_up(error)

    def give_up(self, error: ConnectionError) -> NoReturn:
        """End this process, since a rank cannot be reached."""
        time.sleep(NOTICED_AFTER_S)  # if one has died, its watch says so meanwhile, and ends this process
        log.error("the engine's %d ranks do not reach each other: %s", self._size, error)
        os._exit(1)

    def close(self) -> None:
        """End them at once: they have nothing to save."""
        self._ending.set()
        for follower in self._followers:
            follower.process.kill()
        for follower in self._followers:
            follower.process.wait()
            follower.channel.close()
        for watch in self._watches:
            watch.join()

    def _watch(self, follower: Follower) -> None:
        status = follower.process.wait()
        if not self._ending.wait(self.patience_s):
            log.error("%s", self._ended(follower, status))
            os._exit(1)

    def _ended(self, follower: Follower, status: int) -> str:
        how = f"signal {-status}" if status < 0 else f"status {status}"
        return f"the engine's rank {follower.rank} of {self._size} died ({how})"
