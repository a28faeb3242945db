"""A file of appended lines, each added in one write, so that nothing is lost when the router is killed."""

import logging
import os
import stat
import sys

log = logging.getLogger(__name__)

STDOUT = "-"


class LineFile:
    """Appends lines. A failed write is counted, and fails no request."""

    def __init__(self, path: str, what: str) -> None:
        """`what` names the file in the router's own log."""
        self.lost_lines = 0
        self._path = path
        self._what = what
        self._lost_before = 0  # `lost_lines` when a write last worked
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._fd = sys.stdout.fileno() if path == STDOUT else os.open(path, flags, 0o600)
        self._torn = False  # whether the last line has no end
        status = os.fstat(self._fd)
        if path != STDOUT and stat.S_ISREG(status.st_mode) and status.st_size:
            try:
                with open(path, "rb") as written:
                    written.seek(-1, os.SEEK_END)
                    self._torn = written.read(1) != b"\n"
            except OSError:  # not readable; an empty line does no harm
                self._torn = True

    def add(self, line: bytes) -> None:
        """Write a line, given without its end."""
        text = b"\n%b\n" % line if self._torn else line + b"\n"
        try:
            written = os.write(self._fd, text)
        except OSError as error:  # a full disk, or a pipe without a reader
            self._lose(str(error))
            return
        if written < len(text):
            self._torn = True
            self._lose("only a part of the line was taken")
            return
        self._torn = False
        if self.lost_lines != self._lost_before:
            log.warning("The %s works again; lines lost: %d", self._what, self.lost_lines - self._lost_before)
            self._lost_before = self.lost_lines

    def _lose(self, why: str) -> None:
        if self.lost_lines == self._lost_before:  # logged once, not for every request
            log.error("Cannot write the %s %s, losing lines: %s", self._what, self._path, why)
        self.lost_lines += 1

    def close(self) -> None:
        if self._path != STDOUT:
            os.close(self._fd)
