"""Both ways of I/O, and buffers at any address. That pages stay out of the page cache is a matter of speed alone."""

import ctypes
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from replica.disk.file import PageIO
from replica.disk.record import PAGE

STRIDE = 2 * PAGE


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.truncate(descriptor, 3 * STRIDE)
    yield descriptor
    os.close(descriptor)


def buffer(size: int, at: int) -> memoryview:
    """A buffer whose address is `at` beyond a page's."""
    return memoryview(mmap.mmap(-1, STRIDE + PAGE))[at : at + size]


def direct(tmp_path: Path) -> int:
    try:
        return os.open(tmp_path / "file", os.O_RDWR | os.O_DIRECT)
    except OSError:
        pytest.skip(f"{tmp_path} is on a file system without direct I/O")


@pytest.mark.parametrize("is_direct", [True, False])
@pytest.mark.parametrize("size", [1, PAGE - 1, PAGE, PAGE + 1, STRIDE])
@pytest.mark.parametrize("at", [0, 8, 512])
def test_any_buffer_is_written_and_read(tmp_path: Path, descriptor: int, is_direct: bool, size: int, at: int) -> None:
    payloads = PageIO(descriptor, direct(tmp_path) if is_direct else None, STRIDE)
    payload, into = buffer(size, at), buffer(size, at)
    for offset in (0, 2 * STRIDE, 0):
        payload[:] = os.urandom(size)
        payloads.write(payload.toreadonly(), offset)
        assert os.pread(descriptor, size, offset) == payload
        payloads.read(into, offset)
        assert into == payload
    assert not any(os.pread(descriptor, STRIDE, STRIDE))
    payloads.close()


def test_a_file_system_that_refuses_direct_reads_and_writes_gets_others(
    tmp_path: Path, descriptor: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A wrong stride has the same error as a disk with larger sectors."""
    caplog.set_level("INFO")
    payloads = PageIO(descriptor, direct(tmp_path), 100)
    payload, into = buffer(100, 8), buffer(100, 8)
    payload[:] = os.urandom(100)
    payloads.write(payload, 0)
    payloads.read(into, 0)
    assert into == payload
    assert caplog.text.count("refuses direct I/O") == 1
    payloads.close()


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the pages of a file")
def test_direct_writes_do_not_fill_the_page_cache(tmp_path: Path, descriptor: int) -> None:
    payloads = PageIO(descriptor, direct(tmp_path), STRIDE)
    payloads.write(buffer(STRIDE, 0), 0)
    assert cached_pages(descriptor) == 0
    payloads.close()
    os.pread(descriptor, STRIDE, 0)
    assert cached_pages(descriptor) >= 2, "what is read the usual way does"


def cached_pages(descriptor: int) -> int:
    """Pages of the file that are in the page cache, found without reading any."""
    size = os.fstat(descriptor).st_size
    with mmap.mmap(descriptor, size) as mapped:
        address = ctypes.addressof(first := ctypes.c_char.from_buffer(mapped))
        found = (ctypes.c_ubyte * (size // PAGE))()
        status = ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), found)
        assert status == 0, os.strerror(ctypes.get_errno())
        del first  # the map cannot be closed while something points into it
        return sum(page & 1 for page in found)


def test_the_end_of_a_file_is_an_error(tmp_path: Path, descriptor: int) -> None:
    payloads = PageIO(descriptor, direct(tmp_path), STRIDE)
    for offset in (3 * STRIDE, 3 * STRIDE - PAGE):
        with pytest.raises(OSError, match="cut off"):
            payloads.read(buffer(STRIDE, 0), offset)
    payloads.close()
