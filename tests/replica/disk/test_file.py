import logging
import os
import resource
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from replica.disk.record import GROUP_SLOTS, MAX_IDENTITY, PAGE, Record
from tests.replica.disk.disks import NUM_SLOTS, PAYLOAD_BYTES, in_place_of, opened, payload, read, record, write

CHAIN = [record(identity, identity - 1, b"salt" if identity == 1 else None) for identity in range(1, NUM_SLOTS + 1)]
FULL = "/dev/full"
BROKEN = "/proc/self/mem"  # EIO, as no process has memory at addresses as low as the offsets in these small files


def test_a_payload_is_read_as_it_was_written(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        for slot, each in enumerate(CHAIN):
            assert write(file, slot, each)
        assert all(read(file, slot, each) for slot, each in enumerate(CHAIN))
        assert file.counters.written == file.counters.read == NUM_SLOTS


@pytest.mark.parametrize("payload_bytes", [1, PAGE, PAYLOAD_BYTES, 3 * PAGE])
def test_a_restarted_process_finds_what_was_written(tmp_path: Path, payload_bytes: int) -> None:
    with opened(tmp_path, payload_bytes=payload_bytes) as file:
        for slot, each in zip((3, 0, 5), CHAIN, strict=False):
            assert write(file, slot, each)
    with opened(tmp_path, payload_bytes=payload_bytes) as file:
        recovery = file.recover()
        assert recovery.records == [(3, CHAIN[0]), (0, CHAIN[1]), (5, CHAIN[2])]
        assert all(read(file, slot, each) for slot, each in recovery.records)


def test_a_new_file_holds_nothing_and_has_its_room(tmp_path: Path) -> None:
    with opened(tmp_path / "new" / "folder") as file:
        assert file.recover().records == []
        assert not any(read(file, slot, CHAIN[0]) for slot in range(NUM_SLOTS))
        found = file.path.stat()
        assert found.st_size == file.layout.file_bytes(NUM_SLOTS) <= found.st_blocks * 512
        assert stat.S_IMODE(found.st_mode) == 0o600
        assert stat.S_IMODE(file.path.parent.stat().st_mode) == 0o700


def test_new_identities_are_above_all_numbers_in_the_file_and_the_clock(tmp_path: Path) -> None:
    orphan = record(MAX_IDENTITY - 1, 7)  # of which recovery says nothing else
    with opened(tmp_path) as file:
        now_ns = time.time_ns()
        assert now_ns <= file.recover().last_identity < MAX_IDENTITY // 2
        assert write(file, 0, orphan)
        assert file.recover() == ([], orphan.identity)


def test_a_slot_is_overwritten(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        assert write(file, 0, CHAIN[0]) and write(file, 0, record(9))
        assert read(file, 0, record(9)) and not read(file, 0, CHAIN[0])
        assert file.recover().records == [(0, record(9))]


def test_an_erased_record_is_gone(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        assert write(file, 0, CHAIN[0]) and write(file, 1, record(9))
        assert file.erase(0)
        assert not read(file, 0, CHAIN[0]) and read(file, 1, record(9))
    with opened(tmp_path) as file:
        assert file.recover().records == [(1, record(9))]


def test_a_cleared_file_is_empty_also_after_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        assert write(file, 0, CHAIN[0]) and write(file, 1, record(9))
        assert file.clear()
        assert not read(file, 0, CHAIN[0]) and file.recover().records == []
        assert write(file, 1, record(10))
    with opened(tmp_path) as file:
        assert file.recover().records == [(1, record(10))]


@pytest.mark.parametrize("expected", [record(2), record(1, exact=b"x"), record(1)._replace(key=5, tokens=bytes(8))])
def test_another_record_than_expected_is_not_read(tmp_path: Path, expected: Record) -> None:
    with opened(tmp_path) as file:
        assert write(file, 0, record(1))
        into = memoryview(bytearray(payload(1)))  # the buffer happens to hold what lies in the slot
        assert not file.read(0, expected, into)
        assert file.counters.wrong_reads == 1


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


@pytest.mark.parametrize("num_slots", [1, GROUP_SLOTS, GROUP_SLOTS + 1])
def test_a_file_keeps_its_records_when_it_grows_and_shrinks(tmp_path: Path, num_slots: int) -> None:
    with opened(tmp_path) as file:
        assert write(file, 0, CHAIN[0]) and write(file, 5, CHAIN[1])
    with opened(tmp_path, num_slots=num_slots) as file:
        assert file.path.stat().st_size == file.layout.file_bytes(num_slots)
        kept = [(0, CHAIN[0]), (5, CHAIN[1])][: min(num_slots, 2)]
        assert file.recover().records == kept
        assert all(read(file, slot, each) for slot, each in kept)
        assert write(file, num_slots - 1, record(77)) and read(file, num_slots - 1, record(77))


def test_what_was_cut_off_is_not_read_when_the_file_has_grown_again(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        assert write(file, 0, CHAIN[0]) and write(file, 5, CHAIN[1])
    opened(tmp_path, num_slots=2).close()
    with opened(tmp_path) as file:
        assert read(file, 0, CHAIN[0]) and not read(file, 5, CHAIN[1])


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


def test_a_file_that_became_read_only_can_be_read(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        assert write(file, 0, CHAIN[0])
        with in_place_of(file.path, str(file.path), os.O_RDONLY):
            assert not write(file, 1, CHAIN[1]) and not file.erase(0) and read(file, 0, CHAIN[0])


def test_a_failed_clear_still_empties_this_process_own_view(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        assert write(file, 0, CHAIN[0])
        with in_place_of(file.path, FULL):
            assert not file.clear()
        assert not read(file, 0, CHAIN[0]) and file.recover().records == []


def test_headers_that_cannot_be_read_are_skipped(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        assert write(file, 0, CHAIN[0])
        with in_place_of(file.path, BROKEN):
            assert file.recover().records == []
        assert file.counters.failed_reads == 1


def test_a_write_beyond_the_limit_of_file_sizes_fails(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        old = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file.layout.payload_offset(1), old[1]))
        try:
            assert write(file, 0, CHAIN[0]) and not write(file, 1, CHAIN[1])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)
        assert write(file, 1, CHAIN[1])


def test_a_folder_that_was_removed_harms_nobody(tmp_path: Path) -> None:
    with opened(tmp_path / "kv") as file:
        file.path.unlink()
        file.path.parent.rmdir()
        assert write(file, 0, CHAIN[0]) and read(file, 0, CHAIN[0])


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


def test_several_threads_use_different_slots(tmp_path: Path) -> None:
    with opened(tmp_path) as file, ThreadPoolExecutor(NUM_SLOTS) as threads:
        for each in range(20):
            records = [record(each * NUM_SLOTS + slot + 1) for slot in range(NUM_SLOTS)]
            assert all(threads.map(lambda slot, of=records: write(file, slot, of[slot]), range(NUM_SLOTS)))
            assert all(threads.map(lambda slot, of=records: read(file, slot, of[slot]), range(NUM_SLOTS)))


def test_no_slots_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_slots is 0; it must be at least 1"):
        opened(tmp_path, num_slots=0)


def test_a_buffer_that_cannot_hold_the_payload_is_a_mistake(tmp_path: Path) -> None:
    with opened(tmp_path) as file, pytest.raises(AssertionError):
        file.write(0, CHAIN[0], payload(1, PAYLOAD_BYTES - 1))
