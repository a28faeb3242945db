"""The disk tier: wall time and CPU to write, read and recover blocks, and to digest weights, beside plain copies.

The disk is the one of the folder for temporary files (TMPDIR). No figure of CPU time has the work of the kernel's own
threads, which write what goes through the page cache.
"""

import mmap
import os
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from replica.disk.file import DiskFile, open_disk_file
from replica.disk.record import FileLayout, Header, Record
from replica.model.demo import CACHE_VARIABLE
from replica.model.weights_digest import SETTLED_NS, weights_digest

BLOCK_SIZE = 16
PAYLOAD_BYTES = 2 * 2**20  # 16 tokens of an 8B model: 32 layers, 8 KV heads of 128, keys and values, 16 bits
NUM_SLOTS = 500
MANY_SLOTS = 60_000  # whose headers are written without payloads: 126 GB would not fit here
WEIGHT_BYTES = 2 * 10**9


def run(rounds: int) -> None:
    with tempfile.TemporaryDirectory(prefix="disk-kv-") as name:
        folder = Path(name)
        print(f"| {NUM_SLOTS} blocks of {PAYLOAD_BYTES / 2**20:g} MiB | GB/s | CPU s/GB |\n| --- | --- | --- |")
        _moving(folder, rounds)
        print("\n| at the start | seconds | CPU s |\n| --- | --- | --- |")
        _recovery(folder, rounds)
        _weights(folder, rounds)
    print()


class _Timed:
    """Wall time, and CPU time of this process and its children, round by round."""

    def __init__(self, name: str, moved_bytes: int = 0) -> None:
        self.name = name
        self.gb = moved_bytes / 1e9
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []

    def round(self, work: Callable[[], object]) -> None:
        began_s, cpu_began_s = time.perf_counter(), _cpu_s()
        work()
        self.wall_s.append(time.perf_counter() - began_s)
        self.cpu_s.append(_cpu_s() - cpu_began_s)

    def row_of_rates(self) -> None:
        _row(self.name, [self.gb / wall_s for wall_s in self.wall_s], statistics.median(self.cpu_s) / self.gb)

    def row_of_times(self) -> None:
        _row(self.name, self.wall_s, statistics.median(self.cpu_s))


def _row(name: str, figures: list[float], cpu_s: float) -> None:
    middle, least, most = statistics.median(figures), min(figures), max(figures)
    print(f"| {name} | **{middle:.3g}** ({least:.3g} to {most:.3g}) | {cpu_s:.2g} |", flush=True)


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _moving(folder: Path, rounds: int) -> None:
    """Blocks in random slots, as eviction leaves them, and what dd does with the same bytes in one row.

    Each round measures everything once, because a disk that others use, too, is not the same from minute to minute.
    """
    plain, size = folder / "plain", NUM_SLOTS * PAYLOAD_BYTES
    slots = random.Random(1).sample(range(NUM_SLOTS), NUM_SLOTS)
    records = [Record(slot, slot + 1, slot, os.urandom(4 * BLOCK_SIZE)) for slot in range(NUM_SLOTS)]
    aligned, unaligned = memoryview(mmap.mmap(-1, PAYLOAD_BYTES)), memoryview(bytearray(PAYLOAD_BYTES + 8))[8:]
    aligned[:] = unaligned[:] = os.urandom(PAYLOAD_BYTES)

    def dd(*options: str) -> None:
        command = ["dd", *options, f"bs={PAYLOAD_BYTES}", f"count={NUM_SLOTS}", "conv=notrunc", "status=none"]
        subprocess.run(command, check=True)

    def write(buffer: memoryview) -> None:
        assert all(file.write(slot, records[slot], buffer) for slot in slots)

    def read(buffer: memoryview) -> None:
        assert all(file.read(slot, records[slot], buffer) for slot in slots)

    with _opened(folder, PAYLOAD_BYTES, NUM_SLOTS) as file, plain.open("wb") as made:
        os.posix_fallocate(made.fileno(), 0, size)
        works: dict[str, Callable[[], object]] = {
            "dd, direct: write": lambda: dd("if=/dev/zero", f"of={plain}", "oflag=direct"),
            "disk tier: write": lambda: write(aligned),
            "disk tier, memory that is not aligned: write": lambda: write(unaligned),
            "dd, page cache and fsync: write": lambda: dd("if=/dev/zero", f"of={plain}", "conv=fsync"),
            "dd, direct: read": lambda: dd(f"if={plain}", "of=/dev/null", "iflag=direct"),
            "disk tier: read": lambda: read(aligned),
            "disk tier, memory that is not aligned: read": lambda: read(unaligned),
            "dd, page cache: read": lambda: dd(f"if={plain}", "of=/dev/null"),
        }
        timed = {name: _Timed(name, size) for name in works}
        write(aligned)
        for _ in range(rounds):
            for name, work in works.items():
                _forget(plain)
                timed[name].round(work)
    for each in timed.values():
        each.row_of_rates()
    file.path.unlink()
    plain.unlink()


def _opened(folder: Path, payload_bytes: int, num_slots: int) -> DiskFile:
    return open_disk_file(
        folder, kv_layout="bench", block_size=BLOCK_SIZE, payload_bytes=payload_bytes, num_slots=num_slots
    )


def _recovery(folder: Path, rounds: int) -> None:
    """The headers of a whole file where they would lie; without payloads, the file takes little room."""
    layout = FileLayout(BLOCK_SIZE, PAYLOAD_BYTES)
    path, generation = folder / "recovery", 7
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    os.truncate(descriptor, layout.file_bytes(MANY_SLOTS))
    for slot in range(MANY_SLOTS):
        header = Header(Record(slot, slot + 1, slot, os.urandom(4 * BLOCK_SIZE)), bytes(16))
        os.pwrite(descriptor, layout.encode_header(header, generation), layout.header_offset(slot))
    os.fsync(descriptor)
    gb = layout.file_bytes(MANY_SLOTS) / 1e9
    timed = _Timed(f"recover {MANY_SLOTS:,} blocks, {gb:.0f} GB")
    with DiskFile(path, layout, MANY_SLOTS, descriptor, None, bytes(16), generation) as file:
        for _ in range(rounds):
            _forget(path)
            timed.round(file.recover)
        assert len(file.recover().records) == MANY_SLOTS
    timed.row_of_times()
    path.unlink()


def _weights(folder: Path, rounds: int) -> None:
    piece, file = os.urandom(WEIGHT_BYTES // 100), folder / "model.safetensors"
    file.write_bytes(piece * 100)
    os.environ[CACHE_VARIABLE] = str(folder / "cache")
    names = ("from the disk", "from the page cache", "kept from the start before")
    cold, warm, kept = (_Timed(f"digest of {WEIGHT_BYTES / 1e9:g} GB of weights, {name}") for name in names)
    for _ in range(rounds):
        shutil.rmtree(folder / "cache", ignore_errors=True)
        _forget(file)
        cold.round(lambda: weights_digest(folder, lambda: 0))  # at time 0 no file is old enough to be kept
        warm.round(lambda: weights_digest(folder, lambda: time.time_ns() + 2 * SETTLED_NS))
        kept.round(lambda: weights_digest(folder))
    for timed in (cold, warm, kept):
        timed.row_of_times()


def _forget(file: Path) -> None:
    """Take a file out of the page cache."""
    with file.open("rb") as opened:
        os.fdatasync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
