import logging
import os
import resource
import time
from pathlib import Path

import pytest

from replica.disk.record import MAX_IDENTITY, PAGE
from tests.replica.disk.disks import NUM_SLOTS, in_place_of, opened, read, record, write

CHAIN = [record(identity, identity - 1, b"salt" if identity == 1 else None) for identity in range(1, NUM_SLOTS + 1)]
FULL = "/dev/full"
BROKEN = "/proc/self/mem"  # EIO, as no process has memory at addresses as low as the offsets in these small files


def test_new_identities_are_above_all_numbers_in_the_file_and_the_clock(tmp_path: Path) -> None:
    orphan = record(MAX_IDENTITY - 1, 7)  # of which recovery says nothing else
    with opened(tmp_path) as file:
        now_ns = time.time_ns()
        assert now_ns <= file.recover().last_identity < MAX_IDENTITY // 2
        assert write(file, 0, orphan)
        assert file.recover() == ([], orphan.identity)


@pytest.mark.parametrize("place", ["header", "payload"])
def test_a_flipped_bit_is_noticed_once_in_the_log(tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as file:
        assert write(file, 0, CHAIN[0]) and write(file, 1, CHAIN[1])
        offset = {"header": file.layout.header_offset(1) + 99, "payload": file.layout.payload_offset(1) + 4999}[place]
        with file.path.open("r+b", buffering=0) as raw:
            [byte] = os.pread(raw.fileno(), 1, offset)
            os.pwrite(raw.fileno(), bytes([byte ^ 4]), offset)
        assert not read(file, 1, CHAIN[1]) and not read(file, 1, CHAIN[1])
        assert read(file, 0, CHAIN[0])
        assert file.counters.wrong_reads == 2
        assert caplog.text.count("a record is torn or damaged") == 1


def test_extra_keys_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        most = file.layout.most_exact_bytes
        assert write(file, 0, record(1, exact=bytes(most))) and not write(file, 1, record(2, exact=bytes(most + 1)))
        assert read(file, 0, record(1, exact=bytes(most)))
        assert (file.counters.written, file.counters.refused_writes) == (1, 1)


@pytest.mark.parametrize("device", [FULL, BROKEN])
def test_a_failing_disk_is_no_exception_and_told_once(
    tmp_path: Path, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with opened(tmp_path) as file:
        assert write(file, 0, CHAIN[0])
        for outages in (1, 2):
            with in_place_of(file.path, device):
                assert not write(file, 1, CHAIN[1]) and not write(file, 1, CHAIN[1])
                assert not file.erase(0) and not read(file, 0, CHAIN[0]) and not read(file, 0, CHAIN[0])
            assert file.counters.failed_writes == 3 * outages
            assert file.counters.failed_reads + file.counters.wrong_reads == 2 * outages
            assert caplog.text.count("writing to") == caplog.text.count("reading from") == 2 * outages - 1
            assert write(file, 1, CHAIN[1]) and read(file, 1, CHAIN[1]) and read(file, 0, CHAIN[0])
            assert caplog.text.count("works again") == 2 * outages


def test_a_write_beyond_the_limit_of_file_sizes_fails(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        old = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file.layout.payload_offset(1), old[1]))
        try:
            assert write(file, 0, CHAIN[0]) and not write(file, 1, CHAIN[1])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)
        assert write(file, 1, CHAIN[1])


def test_a_file_that_was_cut_off_meanwhile_is_not_read(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        assert write(file, 0, CHAIN[0])
        os.truncate(file.path, file.layout.payload_offset(0) + 100)
        assert not read(file, 0, CHAIN[0])
        os.truncate(file.path, 0)
        assert not read(file, 0, CHAIN[0])
        assert file.recover().records == []


def test_a_closed_file_fails_and_touches_no_other(tmp_path: Path) -> None:
    file = opened(tmp_path)
    assert write(file, 0, CHAIN[0])
    file.close()
    file.close()
    others = [os.open(tmp_path / str(number), os.O_RDWR | os.O_CREAT) for number in range(4)]  # get the same numbers
    assert not write(file, 0, CHAIN[0]) and not read(file, 0, CHAIN[0]) and not file.erase(0)
    for descriptor in others:
        assert os.fstat(descriptor).st_size == 0
        os.close(descriptor)


@pytest.mark.parametrize("page", [b"", b"WARMKV\r\n" + bytes(PAGE - 8), b"WARMKV\r\n" + b"\xff" * (PAGE - 8)])
def test_a_file_with_a_damaged_head_starts_empty(tmp_path: Path, page: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as file:
        assert write(file, 0, CHAIN[0])
    with file.path.open("r+b") as raw:
        raw.write(page or bytes(PAGE))
    with opened(tmp_path) as again:
        assert again.path == file.path
        assert again.recover().records == []
        assert write(again, 0, record(3)) and read(again, 0, record(3))
    assert caplog.text.count("has a damaged head") == bool(page)
