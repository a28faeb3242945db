"""The state of keys with limits, in memory that all workers of a router share.

A row holds a key's state, and for each worker the requests that it has running. A lock is held for a few microseconds;
the kernel takes it from a worker that dies. One that is stopped while it holds it is not waited for.
"""

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from itertools import chain
from typing import IO

from router.tenants.limits import BUCKETS, Bucket, KeyState, Use

MOST_KEYS = 2**14  # by name, also those that were removed since the start
TRIES = 1000
AMOUNTS = len(Use._fields)
_HASH = struct.Struct("=Q")  # of the name; 0: free
_STATE = struct.Struct(f"={2 * BUCKETS}dq{2 * AMOUNTS}q")  # buckets, the day, what was used then, what is saved of it
_RUNNING = struct.Struct("=q")
_HEAD_BYTES = _HASH.size + _STATE.size


class SharedLimits:
    """Make it before the workers are forked; each then calls `begin`."""

    def __init__(self, workers: int = 1, lock: IO[bytes] | None = None, most_keys: int = MOST_KEYS) -> None:
        """`lock`: an empty file that is open; None: for one process."""
        self._workers = workers
        self._most_keys = most_keys
        self._row_bytes = _HEAD_BYTES + workers * _RUNNING.size
        self._memory = mmap.mmap(-1, most_keys * self._row_bytes)
        self._lock = lock
        self._number = 0
        self._rows: dict[str, int] = {}  # where they begin, by name
        self.touched: set[str] = set()  # keys whose state this worker has looked at, for who saves it

    def begin(self, number: int) -> None:
        """Be this worker from now on."""
        self._number = number

    def ended(self, number: int) -> None:
        """Forget the running requests of a worker that has ended."""
        for row in range(0, len(self._memory), self._row_bytes):
            if _HASH.unpack_from(self._memory, row)[0]:
                _RUNNING.pack_into(self._memory, self._place(row, number), 0)

    @contextmanager
    def opened(self, name: str) -> Iterator[KeyState]:
        """The state of a key, for all workers; changes are kept, of the running requests as this worker's."""
        self.touched.add(name)
        with self._locked():
            row = self._row(name)
            state = self._read(row)
            in_flight = state.in_flight
            try:
                yield state
            finally:
                self._write(row, state)
                if state.in_flight != in_flight:
                    self._count(row, state.in_flight - in_flight)

    # ---- parts

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if self._lock is None:
            yield
            return
        for _ in range(TRIES):
            try:
                fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.sched_yield()
            else:
                break
        try:
            yield
        finally:
            fcntl.lockf(self._lock, fcntl.LOCK_UN)

    def _read(self, row: int) -> KeyState:
        found = _STATE.unpack_from(self._memory, row + _HASH.size)
        buckets = [Bucket(found[i], found[i + 1]) for i in range(0, 2 * BUCKETS, 2)]
        day, *used = found[2 * BUCKETS :]
        running = sum(self._running(row, number) for number in range(self._workers))
        return KeyState(buckets, day, Use(*used[:AMOUNTS]), Use(*used[AMOUNTS:]), running)

    def _write(self, row: int, state: KeyState) -> None:
        buckets = chain.from_iterable((bucket.level, bucket.filled_s) for bucket in state.buckets)
        _STATE.pack_into(self._memory, row + _HASH.size, *buckets, state.day, *state.today, *state.saved)

    def _row(self, name: str) -> int:
        """The beginning of the key's row; a new key gets a free one."""
        row = self._rows.get(name)
        if row is None:
            hashed = int.from_bytes(blake2b(name.encode(), digest_size=8).digest()) or 1
            row = self._rows[name] = self._found(hashed)
        return row

    def _found(self, hashed: int) -> int:
        for i in range(self._most_keys):
            row = (hashed + i) % self._most_keys * self._row_bytes
            there = _HASH.unpack_from(self._memory, row)[0]
            if there == hashed:
                return row
            if not there:
                _HASH.pack_into(self._memory, row, hashed)
                self._write(row, KeyState.fresh())
                return row
        return hashed % self._most_keys * self._row_bytes  # shared with another key: there were very many

    def _place(self, row: int, number: int) -> int:
        return row + _HEAD_BYTES + number * _RUNNING.size

    def _running(self, row: int, number: int) -> int:
        running: int = _RUNNING.unpack_from(self._memory, self._place(row, number))[0]
        return running

    def _count(self, row: int, change: int) -> None:
        place = self._place(row, self._number)
        _RUNNING.pack_into(self._memory, place, self._running(row, self._number) + change)
