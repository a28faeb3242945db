"""The other ranks of an engine, as its own process sees them: its children.

They end with it, however it ends. If one of them ends by itself, the engine does too, at once: nothing can be computed
without it, and the engine may be waiting for it in a collective.
"""

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import chain, combinations
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NamedTuple, NoReturn

from replica.config import EngineConfig
from replica.parallel import memory
from replica.parallel.group import Group, memory_size
from replica.parallel.messages import Failed, Start, ToFollower, encode, receive_answer
from replica.parallel.shares import Share

log = logging.getLogger(__name__)

NOTICED_AFTER_S = 5.0


class Follower(NamedTuple):
    rank: int
    process: subprocess.Popen[bytes]
    channel: "Connection[bytes, bytes]"


class Followers:
    def __init__(self, config: EngineConfig, kv_fd: int) -> None:
        """Start them; they begin to load their shares of the model."""
        self._size = config.tensor_parallel_size
        self._ending = False
        self._watches: list[threading.Thread] = []
        self._followers: list[Follower] = []
        with ExitStack() as given, ExitStack() as undo:
            exchange = memory.create(memory_size(self._size))
            given.callback(os.close, exchange)
            own, *theirs = connected(self._size)
            for peer in chain.from_iterable(theirs):
                given.enter_context(peer)
            self.group = Group(Share(0, self._size), exchange, own)
            undo.callback(self.close)
            for rank, peers in enumerate(theirs, start=1):
                sockets = [peer.fileno() for peer in peers]
                follower = _started(rank, [kv_fd, exchange, *sockets])
                self._followers.append(follower)
                follower.channel.send_bytes(encode(Start(config, rank, kv_fd, exchange, sockets)))
            undo.pop_all()

    @property
    def pids(self) -> list[int]:
        return [follower.process.pid for follower in self._followers]

    def wait_ready(self) -> None:
        """Wait until they have loaded their shares. ValueError, OSError: one of them cannot, or has died."""
        for follower in self._followers:
            try:
                answer = receive_answer(follower.channel)
            except (EOFError, ConnectionError) as error:
                raise OSError(self._ended(follower, follower.process.wait())) from error
            if isinstance(answer, Failed):
                raise ValueError(answer.message)

    def watch(self) -> None:
        """From now on a death ends the engine."""
        for follower in self._followers:
            watch = threading.Thread(target=self._watch, args=[follower], daemon=True)
            watch.start()
            self._watches.append(watch)

    def tell(self, message: ToFollower) -> None:
        raw = encode(message)
        for follower in self._followers:
            follower.channel.send_bytes(raw)

    def give_up(self, error: ConnectionError) -> NoReturn:
        """End this process, since a rank cannot be reached."""
        time.sleep(NOTICED_AFTER_S)  # if one has died, its watch says so meanwhile, and ends this process
        log.error("the engine's %d ranks do not reach each other: %s", self._size, error)
        os._exit(1)

    def close(self) -> None:
        """End them at once: they have nothing to save."""
        self._ending = True
        for follower in self._followers:
            follower.process.kill()
        for follower in self._followers:
            follower.process.wait()
            follower.channel.close()
        self.group.close()
        for watch in self._watches:
            watch.join()

    def _watch(self, follower: Follower) -> None:
        status = follower.process.wait()
        if not self._ending:
            log.error("%s", self._ended(follower, status))
            os._exit(1)

    def _ended(self, follower: Follower, status: int) -> str:
        how = f"signal {-status}" if status < 0 else f"status {status}"
        return f"the engine's rank {follower.rank} of {self._size} died ({how})"


def connected(size: int) -> list[list[socket.socket]]:
    """Return each rank's sockets to all others, in their order."""
    peers: list[list[socket.socket]] = [[] for _ in range(size)]
    for one, other in combinations(range(size), 2):
        pair = socket.socketpair()
        peers[one].append(pair[0])
        peers[other].append(pair[1])
    return peers


def _started(rank: int, descriptors: Sequence[int]) -> Follower:
    ours, theirs = Pipe()
    with theirs:
        # The child sees the current folder as a place of modules only if this process does.
        safe = [] if "" in sys.path or os.getcwd() in sys.path else ["-P"]
        process = subprocess.Popen(
            [sys.executable, *safe, "-m", "replica.parallel.follower", str(theirs.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno(), *descriptors],
        )
    return Follower(rank, process, ours)
