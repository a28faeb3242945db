"""One JSON line for every request: who asked what of which replica, and how it went; nothing that a client said."""

import logging
import os
import sys
import time
from typing import Any

import msgspec
from msgspec import Struct

log = logging.getLogger(__name__)

STDOUT = "-"
_encode = msgspec.json.Encoder().encode


class Line(Struct, omit_defaults=True):
    ts: float
    client: str | None
    method: str
    path: str
    status: int
    duration_s: float
    sent_bytes: int
    request_id: str
    key: str | None = None
    model: str | None = None
    replica: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    ttft_s: float | None = None
    retries: int = 0
    resumes: int = 0
    client_left: bool = False


class AccessLog:
    """Written a line at a time, so that nothing is lost when the router is killed.

    What cannot be written is counted, and nobody's request fails for it.
    """

    def __init__(self, path: str) -> None:
        self.lost_lines = 0
        self._path = path
        self._lost_before = 0  # when it last worked
        self._torn = False  # whether the last line has no end
        self._fd = sys.stdout.fileno() if path == STDOUT else _open(path)

    @classmethod
    def open(cls, path: str | None) -> "AccessLog | None":
        return None if path is None else cls(path)

    def answered(self, line: Line) -> None:
        text = _encode(line) + b"\n"
        text = b"\n" + text if self._torn else text
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
            log.warning("The access log is written again; lines lost: %d", self.lost_lines - self._lost_before)
            self._lost_before = self.lost_lines

    def _lose(self, why: str) -> None:
        if self.lost_lines == self._lost_before:  # said once, and not for every request
            log.error("The access log %s cannot be written, its lines are lost: %s", self._path, why)
        self.lost_lines += 1

    def close(self) -> None:
        if self._path != STDOUT:
            os.close(self._fd)


def _open(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


def line_of(scope: Any, *, status: int, duration_s: float, sent_bytes: int, request_id: str, **more: Any) -> Line:
    client = scope["client"]
    return Line(
        ts=round(time.time(), 6),
        client=client[0] if client else None,
        method=scope["method"],
        path=scope["path"],
        status=status,
        duration_s=round(duration_s, 6),
        sent_bytes=sent_bytes,
        request_id=request_id,
        **more,
    )
