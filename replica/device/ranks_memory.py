"""The KV of several devices as whole blocks, the parts of all ranks one after another; lower media know no ranks.

A follower's part goes through a window, memory that it shares with the engine. There is one for each direction, so
that a save does not wait for loads.
"""

import logging
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Lock, Thread
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np

from replica.parallel import memory
from replica.parallel.following import Channel
from replica.runners.block_memory import BlockMemory

log = logging.getLogger(__name__)

WINDOW_BYTES = 32 << 20

Copy: TypeAlias = Callable[[Sequence[int], Sequence[memoryview]], None]

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[int]).decode


class End(NamedTuple):
    """A follower's end of a lane, by descriptors that it inherits."""

    channel: int
    window: int


class Lane:
    """One direction of copies, between the engine and all followers, for one thread at a time."""

    def __init__(self, followers: int, part_bytes: int) -> None:
        """`part_bytes` is the size of one rank's part of a block."""
        self.part_bytes = part_bytes
        self.at_once = max(1, WINDOW_BYTES // part_bytes)  # blocks
        self.lock = Lock()
        self._channels: list[Connection[bytes, bytes]] = []
        self.windows: list[memoryview] = []
        self._theirs: list[Connection[bytes, bytes]] = []
        self.ends: list[End] = []
        for _ in range(followers):
            ours, theirs = Pipe()
            descriptor = memory.create(self.at_once * part_bytes)
            self._channels.append(ours)
            self._theirs.append(theirs)
            self.windows.append(opened(descriptor))
            self.ends.append(End(theirs.fileno(), descriptor))

    def give(self) -> None:
        """Close the followers' ends, which they have inherited."""
        for theirs, end in zip(self._theirs, self.ends, strict=True):
            theirs.close()
            os.close(end.window)
        self._theirs, self.ends = [], []

    @contextmanager
    def told(self, blocks: Sequence[int]) -> Iterator[None]:
        """Have all followers copy these blocks meanwhile, and wait for them."""
        for channel in self._channels:
            channel.send_bytes(_encode(blocks))
        try:
            yield
        finally:
            for channel in self._channels:
                channel.recv_bytes()

    def close(self) -> None:
        self.give()
        for channel in self._channels:
            channel.close()


class RanksMemory:
    is_host = False

    def __init__(self, own: BlockMemory, reads: Lane, writes: Lane) -> None:
        self._own = own
        self._reads = reads
        self._writes = writes
        self._part = own.block_bytes
        self.block_bytes = own.block_bytes * (1 + len(reads.windows))

    def read(self, blocks: Sequence[int], into: Sequence[memoryview]) -> None:
        for some, targets in _pieces(blocks, into, self._reads.at_once):
            with self._reads.lock:
                with self._reads.told(some):
                    self._own.read(some, [target[: self._part] for target in targets])
                for part, window in self._parts(self._reads, targets):
                    np.copyto(part, window)

    def write(self, blocks: Sequence[int], payloads: Sequence[memoryview]) -> None:
        for some, sources in _pieces(blocks, payloads, self._writes.at_once):
            with self._writes.lock:
                for part, window in self._parts(self._writes, sources):
                    np.copyto(window, part)
                with self._writes.told(some):
                    self._own.write(some, [source[: self._part] for source in sources])

    def pin(self, host: memoryview) -> None:
        self._own.pin(host)

    def _parts(self, lane: Lane, blocks: Sequence[memoryview]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield each follower's part of each block, and its place in the window."""
        for rank, window in enumerate(lane.windows, start=1):
            for place, block in enumerate(blocks):
                part = np.frombuffer(block, np.uint8)[rank * self._part : (rank + 1) * self._part]
                yield part, np.frombuffer(window, np.uint8)[place * self._part : (place + 1) * self._part]


class Keeper(Thread):
    """A follower's side of a lane: it copies what it is told, until the engine has ended."""

    def __init__(
        self, begin: Callable[[], None], channel: Channel, window: memoryview, part_bytes: int, copy: Copy
    ) -> None:
        """`begin` is called first, in the thread."""
        super().__init__(daemon=True)
        self._begin = begin
        self._channel = channel
        self._window = window
        self._part_bytes = part_bytes
        self._copy = copy

    def run(self) -> None:
        try:
            self._begin()
            while True:
                blocks = _decode(self._channel.recv_bytes())
                begins = range(0, len(blocks) * self._part_bytes, self._part_bytes)
                self._copy(blocks, [self._window[begin : begin + self._part_bytes] for begin in begins])
                self._channel.send_bytes(b"")
        except (EOFError, ConnectionError):
            pass
        except BaseException:  # the engine waits for this copy, and hears of this process's end
            log.exception("KV cannot be copied")
            os._exit(1)


def opened(descriptor: int) -> memoryview:
    return memoryview(mmap.mmap(descriptor, os.fstat(descriptor).st_size))


def _pieces(
    blocks: Sequence[int], views: Sequence[memoryview], size: int
) -> Iterator[tuple[Sequence[int], Sequence[memoryview]]]:
    for begin in range(0, len(blocks), size):
        yield blocks[begin : begin + size], views[begin : begin + size]
