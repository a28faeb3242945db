"""A file that may change while the router runs; polled once a second, since not every file system reports changes."""

import os
from pathlib import Path
from typing import TypeAlias

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


def _stamp_of(path: str) -> _Stamp:
    # A file that was replaced within the clock's tick has another inode.
    status = os.stat(path)
    return status.st_mtime_ns, status.st_ino, status.st_size
