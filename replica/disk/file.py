"""The disk tier's file: in each slot a record, that is a block's name, content and KV, or nothing.

The tier decides which slot to use, and may overwrite a record without erasing it. To survive a crash, no order of
writes is needed: whatever is torn does not fit its checksum, and is never taken for a block's KV.
"""

import errno
import logging
import mmap
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
from xxhash import xxh3_128_digest

from replica.disk.folder import DiskFolder
from replica.disk.record import (
    GROUP_SLOTS,
    PAGE,
    FileLayout,
    Header,
    Record,
    Recovered,
    Recovery,
    file_fingerprint,
    findable,
)
from replica.messages import DiskCounters

Move: TypeAlias = Callable[[int, memoryview, int], None]  # (descriptor, memory, offset)

CLOSED = -1  # no descriptor: a late call fails, and never reaches a file that got the same number


class PageIO:
    """Payloads of one file. Safe in several threads, as long as they use different offsets."""

    def __init__(self, cached: int, direct: int | None, stride: int) -> None:
        self._cached = cached
        self._direct = direct  # the same file opened again, with O_DIRECT
        self._stride = stride
        self._scratch: list[mmap.mmap] = []  # aligned buffers that nobody uses now

    def write(self, payload: memoryview, offset: int) -> None:
        self._move(write_all, payload, offset)

    def read(self, into: memoryview, offset: int) -> None:
        self._move(read_all, into, offset)

    def close(self) -> None:
        """Close what only this uses; `cached` is the caller's."""
        if self._direct is not None:
            os.close(self._direct)
        self._direct, self._cached = None, CLOSED

    def _move(self, move: Move, view: memoryview, offset: int) -> None:
        if self._direct is not None:
            try:
                self._move_direct(self._direct, move, view, offset)
            except OSError as error:
                # Some file systems take O_DIRECT when a file is opened and refuse it later.
                if error.errno != errno.EINVAL:
                    raise
                self._direct = None
                log.info("the file system refuses direct I/O (%s); the page cache is used", error)
            else:
                return
        move(self._cached, view, offset)
        os.posix_fadvise(self._cached, offset, self._stride, os.POSIX_FADV_DONTNEED)

    def _move_direct(self, direct: int, move: Move, view: memoryview, offset: int) -> None:
        address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
        if not (address % PAGE or len(view) % PAGE):
            move(direct, view, offset)
            return
        try:
            buffer = self._scratch.pop()
        except IndexError:
            buffer = mmap.mmap(-1, self._stride)
        try:
            buffer[: len(view)] = view
            move(direct, memoryview(buffer), offset)
            if move is read_all:
                view[:] = memoryview(buffer)[: len(view)]
        finally:
            self._scratch.append(buffer)


def write_all(descriptor: int, payload: memoryview, offset: int) -> None:
    while payload:
        written = os.pwrite(descriptor, payload, offset)
        payload, offset = payload[written:], offset + written


def read_all(descriptor: int, into: memoryview, offset: int) -> None:
    """OSError also where the file ends too early."""
    while into:
        count = os.preadv(descriptor, [into], offset)
        if not count:
            raise OSError(errno.ENODATA, "the file was cut off")
        into, offset = into[count:], offset + count


log = logging.getLogger(__name__)


def open_disk_file(folder: Path, *, kv_layout: str, block_size: int, payload_bytes: int, num_slots: int) -> "DiskFile":
    """Take the first file of this layout that no other replica uses, or make one; OSError, with the reason, if not."""
    if num_slots < 1:
        raise ValueError(f"num_slots is {num_slots}; it must be at least 1")
    layout = FileLayout(block_size, payload_bytes)
    fingerprint = file_fingerprint(kv_layout, block_size, payload_bytes)
    with DiskFolder(folder) as opened:
        descriptor, name = opened.take(fingerprint.hex())
        try:
            opened.reserve(descriptor, fingerprint.hex(), layout.file_bytes(num_slots))
            generation = _generation(folder / name, descriptor, layout, fingerprint)
        except OSError:
            os.close(descriptor)
            raise
        direct = opened.open_direct(descriptor, name)
    return DiskFile(folder / name, layout, num_slots, descriptor, direct, fingerprint, generation)


def _generation(path: Path, descriptor: int, layout: FileLayout, fingerprint: bytes) -> int:
    """The generation that the file's head gives, or a new one in a new head."""
    page = os.pread(descriptor, PAGE, 0)
    generation = layout.generation_in(page, fingerprint)
    if generation is not None:
        return generation
    if any(page):
        log.warning("%s has a damaged head, so it is used as an empty file", path)
    return _renew(descriptor, layout, fingerprint)


def _renew(descriptor: int, layout: FileLayout, fingerprint: bytes) -> int:
    """Write a head of a new generation, for which all records of others are void."""
    generation = secrets.randbits(64)
    write_all(descriptor, memoryview(layout.encode_head(fingerprint, generation)), 0)
    os.fdatasync(descriptor)
    return generation


class DiskFile:
    """One file, which belongs to this process. Errors of the disk become False, a count, and a line in the log.

    `read`, `write` and `erase` may run in several threads, as long as no two of them use the same slot.
    """

    def __init__(
        self,
        path: Path,
        layout: FileLayout,
        num_slots: int,
        descriptor: int,
        direct: int | None,
        fingerprint: bytes,
        generation: int,
    ) -> None:
        self.path = path
        self.layout = layout
        self.num_slots = num_slots
        self.counters = DiskCounters()
        self._descriptor = descriptor  # its lock makes the file ours
        self._fingerprint = fingerprint
        self._generation = generation
        self._payloads = PageIO(descriptor, direct, layout.stride)
        self._writing = _Streak(f"writing to {path}")
        self._reading = _Streak(f"reading from {path}")
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # behind headers lie payloads: never read ahead

    def __enter__(self) -> "DiskFile":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- recover

    def recover(self) -> Recovery:
        """Read all headers. A payload is verified when it is read."""
        found: list[Recovered] = []
        size = self.layout.header_bytes
        table = memoryview(bytearray(self.layout.table_bytes))
        for first in range(0, self.num_slots, GROUP_SLOTS):
            try:
                read_all(self._descriptor, table, self.layout.header_offset(first))
            except OSError as error:
                self.counters.failed_reads += 1
                self._reading.failed(str(error))
                continue
            for index in range(min(GROUP_SLOTS, self.num_slots - first)):
                header = self.layout.decode_header(table[index * size : (index + 1) * size], self._generation)
                if header is not None:
                    found.append(Recovered(first + index, header.record))
        # Above the clock, too: a header that cannot be read today may name a number that somebody gave to its parent.
        highest = max((each.record.identity for each in found), default=0)
        return Recovery(list(findable(found)), max(highest, time.time_ns()))

    # ---- write

    def write(self, slot: int, record: Record, payload: memoryview) -> bool:
        """False if it could not be written; the slot then holds nothing."""
        assert 0 <= slot < self.num_slots and len(payload) == self.layout.payload_bytes
        try:
            header = self.layout.encode_header(Header(record, xxh3_128_digest(payload)), self._generation)
        except ValueError:
            self.counters.refused_writes += 1
            return False
        try:
            self._payloads.write(payload, self.layout.payload_offset(slot))
            write_all(self._descriptor, memoryview(header), self.layout.header_offset(slot))
        except OSError as error:
            self.counters.failed_writes += 1
            self._writing.failed(str(error))
            return False
        self.counters.written += 1
        self._writing.worked()
        return True

    def erase(self, slot: int) -> bool:
        """Let recovery find nothing in this slot."""
        assert 0 <= slot < self.num_slots
        try:
            write_all(self._descriptor, memoryview(bytes(self.layout.header_bytes)), self.layout.header_offset(slot))
        except OSError as error:
            self.counters.failed_writes += 1
            self._writing.failed(str(error))
            return False
        return True

    def clear(self) -> bool:
        """Erase all slots at once, for good. False: after a restart they may be found again."""
        self._generation = secrets.randbits(64)  # also if the head cannot be written
        try:
            self._generation = _renew(self._descriptor, self.layout, self._fingerprint)
        except OSError as error:
            self.counters.failed_writes += 1
            self._writing.failed(str(error))
            return False
        return True

    # ---- read

    def read(self, slot: int, record: Record, into: memoryview) -> bool:
        """Fill `into` with the payload of exactly this record. False: it is not there, and `into` may hold anything."""
        assert 0 <= slot < self.num_slots and len(into) == self.layout.payload_bytes
        page = memoryview(bytearray(self.layout.header_bytes))
        try:
            read_all(self._descriptor, page, self.layout.header_offset(slot))
            header = self.layout.decode_header(page, self._generation)
            if header is not None and header.record == record:
                self._payloads.read(into, self.layout.payload_offset(slot))
        except OSError as error:
            self.counters.failed_reads += 1
            self._reading.failed(str(error))
            return False
        if header is None or header.record != record or xxh3_128_digest(into) != header.digest:
            self.counters.wrong_reads += 1
            self._reading.failed("a record is torn or damaged")
            return False
        self.counters.read += 1
        self._reading.worked()
        return True

    def close(self) -> None:
        """Give the file back, for another process to take."""
        if self._descriptor != CLOSED:
            self._payloads.close()
            os.close(self._descriptor)
            self._descriptor = CLOSED


class _Streak:
    """Says that something fails once, and once more when it works again."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._failing = False

    def failed(self, reason: str) -> None:
        if not self._failing:
            self._failing = True
            log.warning("%s fails, blocks are computed instead: %s", self._what, reason)

    def worked(self) -> None:
        if self._failing:
            self._failing = False
            log.info("%s works again", self._what)
