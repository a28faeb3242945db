"""A file that may change while the router runs; polled once a second, since not every file system reports changes."""

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Generic, TypeAlias, TypeVar

from api.model_files import MAX_BYTES, read_bytes_of

log = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_INTERVAL_S = 1.0

_Stamp: TypeAlias = tuple[int, int, int]


class WatchedFile:
    """A file that changes is read when two looks have found it the same: it may be about to be written."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._stamp: _Stamp | None = None  # the state of the file that was read last
        self._seen: _Stamp | None = None  # the file's state at the last look
        self._is_known = False  # it has been read once

    def read_if_changed(self) -> str | None:
        """The text if the file may have changed, else None; raise ValueError if it cannot be read."""
        try:
            before, self._seen = self._seen, _stamp_of(self.path)
            if self._seen == self._stamp or (self._is_known and self._seen != before):
                return None
            text = read_bytes_of(self.path, MAX_BYTES).decode()
            if _stamp_of(self.path) != self._seen:
                return None  # it was written meanwhile
            if self._is_known and not text.strip():  # truncated, and not written yet
                raise ValueError("it is empty; write a comment if that is meant")
        except (OSError, ValueError) as error:
            self._stamp = None
            raise ValueError(f"cannot read {self.path!r}: {getattr(error, 'strerror', None) or error}") from error
        self._stamp, self._is_known = self._seen, True
        return text


class LastGood(Generic[T]):
    """The content of a file; while it is broken, the last good one stays."""

    def __init__(self, path: str, parse: Callable[[str, str], T], what: str) -> None:
        """`parse` gets path and text, and raises ValueError."""
        self.where = path
        self.problem: str | None = None
        self.is_known = False  # it has been valid once
        self._file = WatchedFile(path)
        self._parse = parse
        self._what = what

    async def run(self, tell: Callable[[T], object]) -> None:
        """Tell the content whenever it changes, until cancelled."""
        while True:
            if (found := self.look()) is not None:
                tell(found)
            await asyncio.sleep(LOOK_INTERVAL_S)

    def look(self) -> T | None:
        """Return it if the file has changed and is valid, else None; each distinct problem is logged once."""
        try:
            text = self._file.read_if_changed()
            found = None if text is None else self._parse(self.where, text)
        except ValueError as error:
            if self.problem != str(error):
                none = f"there are no {self._what} until it is mended"
                log.warning("%s; %s", error, f"keeping the previous {self._what}" if self.is_known else none)
            self.problem = str(error)
            return None
        if text is not None:
            if self.problem is not None:
                log.warning("%s can be used again", self.where)
            self.problem, self.is_known = None, True
        return found


def _stamp_of(path: str) -> _Stamp:
    # A file that was replaced within the clock's tick has another inode.
    status = os.stat(path)
    return status.st_mtime_ns, status.st_ino, status.st_size
