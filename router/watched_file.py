"""A file that may change while the router runs; polled once a second, since not every file system reports changes."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_INTERVAL_S = 1.0

_Stamp: TypeAlias = tuple[int, int, int]


class WatchedFile:
    def __init__(self, path: str) -> None:
        self.path = path
        self._stamp: _Stamp | None = None

    def read_if_changed(self) -> str | None:
        """The text if the file may have changed, else None; raise ValueError if it cannot be read."""
        try:
            stamp = _stamp_of(self.path)
            if stamp == self._stamp:
                return None
            text = Path(self.path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            self._stamp = None
            raise ValueError(f"cannot read {self.path!r}: {getattr(error, 'strerror', None) or error}") from error
        self._stamp = stamp  # taken before reading, so a write meanwhile is noticed next time
        return text


class LastGood(Generic[T]):
    """The content of a file; while it is broken, the last good one stays."""

    def __init__(self, path: str, parse: Callable[[str, str], T], what: str) -> None:
        """`parse` gets path and text, and raises ValueError."""
        self.problem: str | None = None
        self.is_known = False  # it has been valid once
        self._file = WatchedFile(path)
        self._parse = parse
        self._what = what

    def look(self) -> T | None:
        """Return it if the file has changed and is valid, else None; call it every second or so."""
        try:
            text = self._file.read_if_changed()
            found = None if text is None else self._parse(self._file.path, text)
        except ValueError as error:
            if self.problem != str(error):
                kept = (
                    f"keeping the previous {self._what}"
                    if self.is_known
                    else f"there are no {self._what} until it is mended"
                )
                log.warning("%s; %s", error, kept)
            self.problem = str(error)
            return None
        if text is not None:
            self.problem, self.is_known = None, True
        return found


def _stamp_of(path: str) -> _Stamp:
    # A file that was replaced within the clock's tick has another inode.
    status = os.stat(path)
    return status.st_mtime_ns, status.st_ino, status.st_size
