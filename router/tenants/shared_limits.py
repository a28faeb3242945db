"""The state of keys with limits, in memory that all workers of a router share.

A row holds a key's state, and for each worker the requests that it has running. A lock is held for a few microseconds;
the kernel takes it from a worker that dies. One that is stopped while it holds it is not waited for.
"""

import fcntl
import mmap
import os
import struct
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from typing import IO

from msgspec import Struct

from router.tenants.limits import BUCKETS, KeyState, Use

MAX_KEYS = 2**14  # names, also those that were removed since the start
TRIES = 1000
AMOUNTS = len(Use._fields)
_HASH = struct.Struct("=Q")  # the name's hash; 0: free
_STATE = struct.Struct(f"={2 * BUCKETS}d{1 + 2 * AMOUNTS}q")  # a KeyState: its levels, their times, and its day
_COUNT = struct.Struct("=q")  # the requests that one worker runs
_HEAD_BYTES = _HASH.size + _STATE.size
_DAY = 2 * BUCKETS
_TODAY = _DAY + 1
_SAVED = _TODAY + AMOUNTS
_use: Callable[[tuple[int, ...]], Use] = partial(tuple.__new__, Use)  # this is no call of Python, twice a request


class SharedLimits:
    """Make it before the workers are forked; each then calls `begin`."""

    def __init__(self, workers: int = 1, lock: IO[bytes] | None = None, most_keys: int = MAX_KEYS) -> None:
        """`lock`: an empty file that is open; None: for one process."""
        self._most_keys = most_keys
        self._running = struct.Struct(f"={workers}q")
        self._row_bytes = _HEAD_BYTES + self._running.size
        self._memory = mmap.mmap(-1, most_keys * self._row_bytes)
        self._lock = lock
        self._number = 0
        self._rows: dict[str, int] = {}  # their beginnings by name
        self._alone: dict[str, _Alone] = {}  # keyed by name, for one process
        self.touched: set[str] = set()  # keys whose state this worker has looked at, for who saves it

    def begin(self, number: int) -> None:
        """Be this worker from now on."""
        self._number = number

    def ended(self, number: int) -> None:
        """Forget the running requests of a worker that has ended."""
        for row in range(0, len(self._memory), self._row_bytes):
            if _HASH.unpack_from(self._memory, row)[0]:
                _COUNT.pack_into(self._memory, self._place(row, number), 0)

    def opened(self, name: str) -> "_Opened | _Alone":
        """The state of a key, for all workers; changes are kept, of the running requests as this worker's."""
        self.touched.add(name)
        return _Opened(self, name) if self._lock is not None else self._alone_of(name)

    def ended_one(self, name: str) -> None:
        """Count one running request of this worker less: all else of the key's state stays as it is."""
        if self._lock is None:
            self._alone_of(name).state.in_flight -= 1
            return
        self.lock()
        try:
            self.count(self.row(name), -1)
        finally:
            self.unlock()

    # ---- parts

    def _alone_of(self, name: str) -> "_Alone":
        return self._alone.get(name) or self._alone.setdefault(name, _Alone(KeyState.fresh()))

    def lock(self) -> None:
        assert self._lock is not None, "one process alone locks nothing"
        for _ in range(TRIES):
            try:
                fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.sched_yield()
            else:
                break

    def unlock(self) -> None:
        assert self._lock is not None, "it was locked"
        fcntl.lockf(self._lock, fcntl.LOCK_UN)

    def read(self, row: int) -> KeyState:
        found = _STATE.unpack_from(self._memory, row + _HASH.size)
        running = sum(self._running.unpack_from(self._memory, row + _HEAD_BYTES))
        return KeyState(
            list(found[:BUCKETS]),
            list(found[BUCKETS:_DAY]),
            found[_DAY],
            _use(found[_TODAY:_SAVED]),
            _use(found[_SAVED:]),
            running,
        )

    def write(self, row: int, state: KeyState) -> None:
        day = (state.day, *state.today, *state.saved)
        _STATE.pack_into(self._memory, row + _HASH.size, *state.levels, *state.filled_s, *day)

    def row(self, name: str) -> int:
        """The beginning of the key's row; a new key gets a free one."""
        row = self._rows.get(name)
        if row is None:
            hashed = int.from_bytes(blake2b(name.encode(), digest_size=8).digest()) or 1
            for i in range(self._most_keys):
                row = (hashed + i) % self._most_keys * self._row_bytes
                there = _HASH.unpack_from(self._memory, row)[0]
                if not there:
                    _HASH.pack_into(self._memory, row, hashed)
                    self.write(row, KeyState.fresh())
                if there in (0, hashed):
                    break
            else:
                row = hashed % self._most_keys * self._row_bytes  # shared with another key: there were very many
            self._rows[name] = row
        return row

    def count(self, row: int, change: int) -> None:
        """Count running requests of this worker."""
        place = self._place(row, self._number)
        _COUNT.pack_into(self._memory, place, _COUNT.unpack_from(self._memory, place)[0] + change)

    def _place(self, row: int, number: int) -> int:
        return row + _HEAD_BYTES + number * _COUNT.size


class _Alone(Struct):
    """One key's state in a process that shares it with no other: nothing is locked, read or written."""

    state: KeyState

    def __enter__(self) -> KeyState:
        return self.state

    def __exit__(self, *_: object) -> None: ...


class _Opened:
    """One key's state, locked; as a class, since a generator would take twice as long."""

    __slots__ = ("_in_flight", "_name", "_row", "_shared", "_state")

    def __init__(self, shared: SharedLimits, name: str) -> None:
        self._shared = shared
        self._name = name

    def __enter__(self) -> KeyState:
        shared = self._shared
        shared.lock()
        try:
            self._row = shared.row(self._name)
            state = self._state = shared.read(self._row)
        except BaseException:
            shared.unlock()
            raise
        self._in_flight = state.in_flight
        return state

    def __exit__(self, *_: object) -> None:
        shared, state = self._shared, self._state
        try:
            shared.write(self._row, state)
            if state.in_flight != self._in_flight:
                shared.count(self._row, state.in_flight - self._in_flight)
        finally:
            shared.unlock()
