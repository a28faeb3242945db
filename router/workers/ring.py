"""Each worker tells the others in memory that all of them share: a ring of messages, which it alone writes.

Nothing is locked or waited for. A reader that was overtaken, or reads what is being overwritten, skips all that there
is: a checksum says so. The messages have numbers, by which it knows how many it has missed.
"""

import struct
from collections.abc import Iterator
from mmap import mmap
from zlib import crc32

RING_BYTES = 2**20  # for each worker; the memory is made before they are forked
HEAD_BYTES = 64  # the number of bytes that were ever written, on a cache line of its own
_COUNT = struct.Struct("@Q")  # native: it is stored and loaded as a whole
_RECORD = struct.Struct("@II")  # length and checksum of the message that follows


class Ring:
    """One worker's ring, and its view of the others, from now on."""

    def __init__(self, memory: mmap, workers: int, number: int) -> None:
        size = len(memory) // workers
        self._memory, self._at, self._bytes = memory, number * size, size - HEAD_BYTES
        [self._written] = _COUNT.unpack_from(memory, self._at)  # by the process that was this worker before
        others = (at for at in range(0, workers * size, size) if at != self._at)
        self._read = {at: _COUNT.unpack_from(memory, at)[0] for at in others}

    def write(self, message: bytes) -> None:
        record, begin = _RECORD.pack(len(message), crc32(message)) + message, self._written % self._bytes
        if len(record) > self._bytes:
            return  # it is lost, as if it had been overwritten
        room, start = self._bytes - begin, self._at + HEAD_BYTES
        self._memory[start + begin : start + min(begin + len(record), self._bytes)] = record[:room]
        self._memory[start : start + max(0, len(record) - room)] = record[room:]
        self._written += len(record)
        _COUNT.pack_into(self._memory, self._at, self._written)

    def read(self) -> Iterator[bytes]:
        """Yield what the others have written since."""
        memory = self._memory
        for at, begin in self._read.items():
            [end] = _COUNT.unpack_from(memory, at)
            if end == begin:
                continue
            self._read[at] = end
            if (size := end - begin) > self._bytes:
                continue
            start, begin = at + HEAD_BYTES, begin % self._bytes
            records = memory[start + begin : start + min(begin + size, self._bytes)]
            records += memory[start : start + size - len(records)]
            place = 0
            while place + _RECORD.size <= size:
                length, checksum = _RECORD.unpack_from(records, place)
                place += _RECORD.size + length
                message = records[place - length : place]
                if crc32(message) != checksum:
                    break
                yield message
