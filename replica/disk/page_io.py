"""Reads and writes of payloads past the page cache, which holds better things than blocks that host memory gave up.

Where a file system refuses O_DIRECT, the page cache is used, and told to drop the pages.
"""

import errno
import logging
import mmap
import os

import numpy as np

from replica.disk.record import PAGE

log = logging.getLogger(__name__)

CLOSED = -1  # no descriptor: a late call fails, and never reaches a file that got the same number


class PageIO:
    """Payloads of one file. Safe in several threads, as long as they use different offsets."""

    def __init__(self, cached: int, direct: int | None, stride: int) -> None:
        self._cached = cached
        self._direct = direct  # the same file opened again, with O_DIRECT
        self._stride = stride
        self._scratch: list[mmap.mmap] = []  # aligned buffers that nobody uses now

    def write(self, payload: memoryview, offset: int) -> None:
        if self._direct is not None:
            try:
                self._write_direct(self._direct, payload, offset)
            except OSError as error:
                self._avoid_direct(error)
            else:
                return
        write_all(self._cached, payload, offset)
        self._drop_pages(offset)

    def read(self, into: memoryview, offset: int) -> None:
        if self._direct is not None:
            try:
                self._read_direct(self._direct, into, offset)
            except OSError as error:
                self._avoid_direct(error)
            else:
                return
        read_all(self._cached, into, offset)
        self._drop_pages(offset)

    def close(self) -> None:
        """Close what only this uses; `cached` is the caller's."""
        if self._direct is not None:
            os.close(self._direct)
        self._direct, self._cached = None, CLOSED

    def _write_direct(self, direct: int, payload: memoryview, offset: int) -> None:
        if _is_aligned(payload):
            write_all(direct, payload, offset)
            return
        buffer = self._take_scratch()
        try:
            buffer[: len(payload)] = payload
            write_all(direct, memoryview(buffer), offset)
        finally:
            self._scratch.append(buffer)

    def _read_direct(self, direct: int, into: memoryview, offset: int) -> None:
        if _is_aligned(into):
            read_all(direct, into, offset)
            return
        buffer = self._take_scratch()
        try:
            read_all(direct, memoryview(buffer), offset)
            into[:] = memoryview(buffer)[: len(into)]
        finally:
            self._scratch.append(buffer)

    def _take_scratch(self) -> mmap.mmap:
        try:
            return self._scratch.pop()
        except IndexError:
            return mmap.mmap(-1, self._stride)

    def _avoid_direct(self, error: OSError) -> None:
        """Some file systems take O_DIRECT when a file is opened and refuse it later."""
        if error.errno != errno.EINVAL:
            raise error
        self._direct = None
        log.info("the file system refuses direct I/O (%s); the page cache is used", error)

    def _drop_pages(self, offset: int) -> None:
        os.posix_fadvise(self._cached, offset, self._stride, os.POSIX_FADV_DONTNEED)


def _is_aligned(view: memoryview) -> bool:
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return not (address % PAGE or len(view) % PAGE)


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
