"""The folder of the disk tier: which file a process takes, and which files go when room is needed.

A process owns a file while it holds the file's lock (flock), so a restarted replica takes the file of its predecessor.
"""

import ctypes
import errno
import fcntl
import logging
import os
import re
import stat
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from replica.disk.record import MAGIC

log = logging.getLogger(__name__)

MAX_FILES = 1024  # the files of one fingerprint
NAME = re.compile(r"kv-([0-9a-f]{32})-[0-9]{1,4}\.blocks")
OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK  # O_NONBLOCK: a pipe in place of a file must not hold us up
FILE_MODE, FOLDER_MODE = 0o600, 0o700
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
NO_FALLOCATE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)

# Not os.posix_fallocate: where a file system cannot reserve room, glibc writes to every page, for minutes.
_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class IdleFile(NamedTuple):
    name: str
    fingerprint: str
    used_at_ns: int
    disk_bytes: int


class DiskFolder:
    """Use it as a context, in one process at a time: the others wait. Files that it opened stay open afterwards."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        self._left_alone: set[str] = set()
        with suppress(OSError):  # NFS locks no folders: a file may seem to be in use while another process looks at it
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def __enter__(self) -> "DiskFolder":
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._descriptor)

    # ---- take a file

    def take(self, fingerprint: str) -> tuple[int, str]:
        """Lock and return the first file of this fingerprint that no process has locked, made if it is missing."""
        for number in range(MAX_FILES):
            name = f"kv-{fingerprint}-{number}.blocks"
            if (descriptor := self._lock(name, os.O_CREAT)) is not None:
                return descriptor, name
        raise OSError(errno.EBUSY, f"{self.path} has {MAX_FILES} files of this model, and all are in use")

    def open_direct(self, descriptor: int, name: str) -> int | None:
        """Open the same file once more, with O_DIRECT; None where that is not possible."""
        try:
            direct = os.open(name, OPEN | os.O_DIRECT, dir_fd=self._descriptor)
        except OSError:
            return None
        if os.path.samestat(os.fstat(direct), os.fstat(descriptor)):
            return direct
        os.close(direct)
        return None

    def _lock(self, name: str, create: int = 0) -> int | None:
        """None for a file that another process has locked, and for anything that is not a disk file of ours."""
        try:
            descriptor = os.open(name, OPEN | create, FILE_MODE, dir_fd=self._descriptor)
        except OSError as error:
            if self._stat(name) is None:
                raise
            self._leave_alone(name, f"it cannot be opened: {error.strerror}")
            return None
        if self._is_locked_now(descriptor, name):
            return descriptor
        os.close(descriptor)
        return None

    def _is_locked_now(self, descriptor: int, name: str) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        opened, present = os.fstat(descriptor), self._stat(name)
        if present is None or not os.path.samestat(opened, present):
            return False  # removed before it was locked
        is_own = opened.st_uid == os.geteuid() and not opened.st_mode & OTHERS_WRITE
        # An empty file is ours too, and one of zeros: its maker was killed before it wrote the head.
        is_file = is_own and stat.S_ISREG(opened.st_mode)
        if not is_file or os.pread(descriptor, len(MAGIC), 0) not in (MAGIC, b"", bytes(len(MAGIC))):
            self._leave_alone(name, "it is no file of the disk tier, or others may write to it")
            return False
        return True

    def _leave_alone(self, name: str, reason: str) -> None:
        if name not in self._left_alone:
            self._left_alone.add(name)
            log.warning("%s is left alone: %s", self.path / name, reason)

    def _stat(self, name: str) -> os.stat_result | None:
        try:
            return os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        except OSError:
            return None

    # ---- make room

    def reserve(self, descriptor: int, fingerprint: str, size: int) -> None:
        """Give the open file this size, and its room on the disk; if there is too little, idle files go first.

        OSError if there still is too little room; the file then has its old size.
        """
        before = os.fstat(descriptor).st_size
        while True:
            try:
                _resize(descriptor, size)
            except OSError as error:
                os.ftruncate(descriptor, before)
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                if not self._remove_one(fingerprint):
                    room = os.fstatvfs(self._descriptor)
                    free_gb = room.f_bavail * room.f_frsize / 1e9
                    said = f"has room for {free_gb:.1f} GB more, and a file of {size / 1e9:.1f} GB does not fit"
                    raise OSError(error.errno, f"{self.path} {said}") from error
            else:
                return

    def _remove_one(self, fingerprint: str) -> bool:
        """Remove the idle file that was used longest ago, one of another fingerprint if there is any."""
        idle = []
        for name in sorted(os.listdir(self._descriptor)):
            if (named := NAME.fullmatch(name)) and (descriptor := self._lock(name)) is not None:
                found = os.fstat(descriptor)
                os.close(descriptor)
                idle.append(IdleFile(name, named[1], found.st_mtime_ns, found.st_blocks * 512))
        idle.sort(key=lambda file: (file.fingerprint == fingerprint, file.used_at_ns))
        for file in idle:
            if (descriptor := self._lock(file.name)) is not None:
                os.unlink(file.name, dir_fd=self._descriptor)
                os.close(descriptor)
                gone = self.path / file.name
                log.warning("removed %s (%.1f GB), which no replica uses, to make room", gone, file.disk_bytes / 1e9)
                return True
        return False


def _resize(descriptor: int, size: int) -> None:
    if os.fstat(descriptor).st_size > size:
        os.ftruncate(descriptor, size)
    while _fallocate(descriptor, 0, 0, size):
        number = ctypes.get_errno()
        if number in NO_FALLOCATE:
            # Check that there is room now, as none can be reserved; a write may still find the disk full.
            room, held = os.fstatvfs(descriptor), os.fstat(descriptor).st_blocks * 512
            if room.f_blocks and size - held > room.f_bavail * room.f_frsize:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.ftruncate(descriptor, size)
            return
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
