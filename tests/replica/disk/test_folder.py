"""Which file is taken, what is left alone, and what is removed. Other processes are real ones."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from replica.disk.file import DiskFile
from replica.disk.folder import DiskFolder
from tests.replica.disk.disks import opened, read, record, write

# Opens a file, says so, and holds it until its input ends.
HOLD = """
import sys
from pathlib import Path
from tests.replica.disk.disks import opened
with opened(Path(sys.argv[1]), kv_layout=sys.argv[2]) as file:
    print(file.path.name, flush=True)
    sys.stdin.read()
"""


@contextmanager
def held(folder: Path, kv_layout: str = "layout") -> Iterator[str]:
    """The name of the file that another process holds."""
    command = [sys.executable, "-c", HOLD, str(folder), kv_layout]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.communicate()
    assert process.returncode == 0


def number(file: DiskFile) -> int:
    return int(file.path.stem.rpartition("-")[2])


def path_of(folder: Path) -> Path:
    with opened(folder) as file:
        file.path.unlink()
    return file.path


def test_replicas_that_share_a_folder_use_a_file_each(tmp_path: Path) -> None:
    with held(tmp_path) as first, opened(tmp_path) as file, opened(tmp_path) as third:
        assert first.endswith("-0.blocks")
        assert (number(file), number(third)) == (1, 2)
        assert write(file, 0, record(1)) and write(third, 0, record(2))
    with opened(tmp_path) as file, opened(tmp_path) as warm:
        assert number(file) == 0 and file.recover().records == []
        assert number(warm) == 1 and warm.recover().records == [(0, record(1))]


def test_a_killed_replica_leaves_its_file_to_the_next(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path), "layout"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        process.kill()
    with opened(tmp_path) as file:
        assert number(file) == 0


def test_models_and_sizes_have_their_own_files(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        assert write(file, 0, record(1))
    for kv_layout, payload_bytes in (("other", 5000), ("layout", 5001)):
        with opened(tmp_path, kv_layout=kv_layout, payload_bytes=payload_bytes) as other:
            assert other.path != file.path and other.recover().records == []
    with opened(tmp_path) as file:
        assert read(file, 0, record(1))


@pytest.mark.parametrize("kind", ["symlink", "dangling", "folder", "pipe", "text", "writable"])
def test_what_is_no_disk_file_is_left_alone(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    folder, precious = tmp_path / "kv", tmp_path / "precious"
    path = path_of(folder)
    precious.write_bytes(b"precious" * 1000)
    if kind == "symlink":
        path.symlink_to(precious)
    elif kind == "dangling":
        path.symlink_to(tmp_path / "nowhere")
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "text":
        path.write_bytes(b"precious" * 1000)
    else:
        path.write_bytes(b"WARMKV\r\n")
        path.chmod(0o666)
    before = path.lstat()
    with opened(folder) as file:
        assert number(file) == 1
        assert write(file, 0, record(1)) and read(file, 0, record(1))
    assert path.lstat() == before or kind == "folder"
    assert precious.read_bytes() == b"precious" * 1000 and not (tmp_path / "nowhere").exists()
    assert caplog.text.count(f"{path} is left alone") == 1


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kv").write_bytes(b"")
    with pytest.raises(FileExistsError):
        opened(tmp_path / "kv")


def test_a_folder_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(OSError):
        opened(Path("/proc/self/kv"))


def test_a_folder_is_looked_at_by_one_process_at_a_time(tmp_path: Path) -> None:
    """Otherwise a file that another process looks at would seem to be in use, and one more of its size be made."""
    other = os.open(tmp_path, os.O_RDONLY)
    try:
        with DiskFolder(tmp_path), pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(other)


# ---- too little room: a small file system in a mount namespace of its own

SMALL_DISK = """
import ctypes, errno, logging, os, sys
from pathlib import Path
from tests.replica.disk.disks import opened, read, record, write
logging.basicConfig(stream=sys.stdout, format="%(message)s")
os.chdir(sys.argv[1])
folder = Path("kv")
def fill(kv_layout, num_slots=60):
    with opened(folder, kv_layout=kv_layout, num_slots=num_slots) as file:
        assert write(file, 0, record(1)) and read(file, 0, record(1))
    return file.path
"""
UNSHARE = ["unshare", "--mount", "--map-root-user", "sh", "-ec"]


def run_on_small_disk(folder: Path, script: str, kind: str = "tmpfs -o size=2m") -> str:
    """Run a script on a file system of 2 MiB; each of its files takes 0.6 MiB."""
    mount = f'mount -t {kind} none "$0"'
    if subprocess.run([*UNSHARE, mount, str(folder)], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount anything, even in a namespace of its own")
    command = [*UNSHARE, f'{mount}; exec "$1" -c "$2" "$0"', str(folder), sys.executable, SMALL_DISK + script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_idle_files_go_oldest_first_when_room_is_needed(tmp_path: Path) -> None:
    said = run_on_small_disk(
        tmp_path,
        """
first, second = fill("first"), fill("second")
os.utime(second, (1, 1))
with opened(folder, kv_layout="busy", num_slots=60) as busy:
    third = fill("third")
    assert first.exists() and third.exists() and busy.path.exists() and not second.exists()
    fill("third", 100)
    assert not first.exists() and third.exists()
    assert write(busy, 1, record(2)) and read(busy, 1, record(2))
""",
    )
    assert said.count("removed") == 2 and "which no replica uses, to make room" in said


def test_a_file_that_does_not_fit_is_refused_and_nothing_in_use_is_lost(tmp_path: Path) -> None:
    run_on_small_disk(
        tmp_path,
        """
with opened(folder, kv_layout="busy", num_slots=60) as busy:
    assert write(busy, 0, record(1))
    warm = fill("warm", 10)
    size = warm.stat().st_size
    try:
        fill("warm", 300)
    except OSError as error:
        assert error.errno == errno.ENOSPC and "kv has room for" in str(error), error
    else:
        raise AssertionError("it fitted")
    assert warm.stat().st_size == size and read(busy, 0, record(1))
    fill("warm", 10)
""",
    )


def test_a_disk_that_becomes_read_only_is_no_exception(tmp_path: Path) -> None:
    said = run_on_small_disk(
        tmp_path,
        """
fill("layout")
os.chdir("/")
folder = Path(sys.argv[1]) / "kv"
MS_RDONLY, MS_REMOUNT = 1, 32
assert ctypes.CDLL(None).mount(b"none", sys.argv[1].encode(), b"tmpfs", MS_RDONLY | MS_REMOUNT, None) == 0
try:
    opened(folder)
except OSError as error:
    assert error.errno == errno.EROFS
    print("refused")
""",
    )
    assert "refused" in said


def test_a_file_system_that_cannot_reserve_room_is_used(tmp_path: Path) -> None:
    run_on_small_disk(
        tmp_path, "path = fill('layout')\nassert path.stat().st_blocks * 512 < path.stat().st_size", "ramfs"
    )
