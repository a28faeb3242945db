"""The usage of keys with a limit, which all workers of a router count together in memory that they share.

A row holds a key's bucket, and for each worker the requests that it has running. A lock is held for a few microseconds;
the kernel takes it from a worker that dies. One that is stopped while it holds it is not waited for.
"""

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import IO

from router.tenants.limits import Bucket, Usage

MOST_KEYS = 2**14  # by name, also those that were removed since the start
TRIES = 1000
_HEAD = struct.Struct("=QddQ")  # hash of the name (0: free), tokens, when they were filled, whether there is a bucket
_RUNNING = struct.Struct("=q")


class SharedLimits:
    """Make it before the workers are forked; each then calls `begin`."""

    def __init__(self, workers: int, lock: IO[bytes], most_keys: int = MOST_KEYS) -> None:
        """`lock`: an empty file that is open."""
        self._workers = workers
        self._most_keys = most_keys
        self._row_bytes = _HEAD.size + workers * _RUNNING.size
        self._memory = mmap.mmap(-1, most_keys * self._row_bytes)
        self._lock = lock
        self._number = 0
        self._rows: dict[str, int] = {}  # where they begin, by name

    def begin(self, number: int) -> None:
        """Be this worker from now on."""
        self._number = number

    def ended(self, number: int) -> None:
        """Forget the running requests of a worker that has ended."""
        for row in range(0, len(self._memory), self._row_bytes):
            if not _HEAD.unpack_from(self._memory, row)[0]:
                continue
            _RUNNING.pack_into(self._memory, self._place(row, number), 0)

    @contextmanager
    def opened(self, name: str) -> Iterator[Usage]:
        """The usage by all workers; if no error is raised, one more request runs here afterwards."""
        with self._locked():
            row = self._row(name)
            hashed, tokens, filled_s, is_filled = _HEAD.unpack_from(self._memory, row)
            running = (self._running(row, number) for number in range(self._workers))
            usage = Usage(Bucket(tokens, filled_s) if is_filled else None, sum(running))
            try:
                yield usage
                self._count(row, 1)
            finally:
                if (bucket := usage.bucket) is not None:
                    _HEAD.pack_into(self._memory, row, hashed, bucket.tokens, bucket.filled_s, 1)

    def left(self, name: str) -> None:
        """Count a request as ended here."""
        self._count(self._row(name), -1)

    # ---- parts

    @contextmanager
    def _locked(self) -> Iterator[None]:
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
            there = _HEAD.unpack_from(self._memory, row)[0]
            if there == hashed:
                return row
            if not there:
                _HEAD.pack_into(self._memory, row, hashed, 0.0, 0.0, 0)
                return row
        return hashed % self._most_keys * self._row_bytes  # shared with another key: there were very many

    def _place(self, row: int, number: int) -> int:
        return row + _HEAD.size + number * _RUNNING.size

    def _running(self, row: int, number: int) -> int:
        running: int = _RUNNING.unpack_from(self._memory, self._place(row, number))[0]
        return running

    def _count(self, row: int, change: int) -> None:
        place = self._place(row, self._number)
        _RUNNING.pack_into(self._memory, place, self._running(row, self._number) + change)
