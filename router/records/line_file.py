"""A file that lines are added to, each in one write: nothing is lost when the router is killed, or when it goes on."""

import logging
import os
import stat
import sys

log = logging.getLogger(__name__)

STDOUT = "-"


class LineFile:
    """What cannot be written is counted, and nobody's request fails for it."""

    def __init__(self, path: str, what: str) -> None:
        """`what` it is, for the router's own log."""
        self.lost_lines = 0
        self._path = path
        self._what = what
        self._lost_before = 0  # when it last worked
        self._fd = sys.stdout.fileno() if path == STDOUT else _open(path)
        self._torn = path != STDOUT and _is_torn(path, self._fd)  # whether the last line has no end

    def add(self, line: bytes) -> None:
        """`line` has no end yet."""
        text = b"\n%b\n" % line if self._torn else line + b"\n"
        try:
            written = os.write(self._fd, text)
        except OSError as error:  # a full disk, a pipe that nobody reads
            self._lose(str(error))
            return
        if written < len(text):
            self._torn = True
            self._lose("only a part of the line was taken")
            return
        self._torn = False
        if self.lost_lines != self._lost_before:
            log.warning("The %s is written again; lines lost: %d", self._what, self.lost_lines - self._lost_before)
            self._lost_before = self.lost_lines

    def _lose(self, why: str) -> None:
        if self.lost_lines == self._lost_before:  # said once, and not for every request
            log.error("The %s %s cannot be written, its lines are lost: %s", self._what, self._path, why)
        self.lost_lines += 1

    def close(self) -> None:
        if self._path != STDOUT:
            os.close(self._fd)


def _open(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _is_torn(path: str, fd: int) -> bool:
    """Whether whoever wrote there before was cut off in a line."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or not status.st_size:
        return False
    try:
        with open(path, "rb") as written:
            written.seek(-1, os.SEEK_END)
            return written.read(1) != b"\n"
    except OSError:  # it may only be written: an empty line does no harm
        return True
