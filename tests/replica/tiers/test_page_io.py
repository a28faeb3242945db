"""Both ways of I/O, and buffers at any address. That pages stay out of the page cache is a matter of speed alone."""

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from replica.tiers.page_io import PageIO
from replica.tiers.record import PAGE

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


def test_direct_writes_do_not_fill_the_page_cache(tmp_path: Path, descriptor: int) -> None:
    payloads = PageIO(descriptor, direct(tmp_path), STRIDE)
    payloads.write(buffer(STRIDE, 0), 0)
    with pytest.raises(BlockingIOError):  # it would have to go to the disk
        os.preadv(descriptor, [bytearray(STRIDE)], 0, os.RWF_NOWAIT)
    payloads.close()


def test_the_end_of_a_file_is_an_error(tmp_path: Path, descriptor: int) -> None:
    payloads = PageIO(descriptor, direct(tmp_path), STRIDE)
    for offset in (3 * STRIDE, 3 * STRIDE - PAGE):
        with pytest.raises(OSError, match="cut off"):
            payloads.read(buffer(STRIDE, 0), offset)
    payloads.close()
