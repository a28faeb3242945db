"""One JSON line for every request: who asked what of which replica, and how it went; nothing that a client said."""

import os
import sys
import time
from typing import Any

import msgspec
from msgspec import Struct

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
    """Written a line at a time, so that nothing is lost when the router is killed."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = sys.stdout.fileno() if path == STDOUT else _open(path)

    @classmethod
    def open(cls, path: str | None) -> "AccessLog | None":
        return None if path is None else cls(path)

    def answered(self, line: Line) -> None:
        os.write(self._fd, _encode(line) + b"\n")

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
