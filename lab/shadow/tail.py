"""Lines of a file as they are written, like `tail -F`, or of standard input."""

import asyncio
import os
import stat
import threading
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress

from api.process.settings import Unusable

CHUNK_BYTES = 256 * 1024
LOOK_S = 0.1


class Splitter:
    """Splits bytes into lines. Pure; None stands for a line that is too long, whose bytes are dropped."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._begun = bytearray()
        self._is_too_long = False

    def feed(self, data: bytes) -> Iterator[bytes | None]:
        *whole, rest = data.split(b"\n")
        for line in whole:
            self._add(line)
            yield from self.end()
        self._add(rest)

    def end(self) -> Iterator[bytes | None]:
        """Yield the last line, which has no line end or has just got it."""
        if self._is_too_long:
            yield None
        elif self._begun and not self._begun.isspace():
            yield bytes(self._begun)
        self._begun.clear()
        self._is_too_long = False

    def _add(self, part: bytes) -> None:
        if self._is_too_long or len(self._begun) + len(part) > self._most_bytes:
            self._is_too_long = True
            self._begun.clear()
        else:
            self._begun += part


async def lines_of_file(path: str, most_bytes: int, *, follow: bool) -> AsyncGenerator[bytes | None, None]:
    """Yield the file's lines from its beginning; with `follow`, go on for ever, also in a file that replaces it."""
    splitter, opened = Splitter(most_bytes), _opened(path)
    try:
        while True:
            while data := os.read(opened, CHUNK_BYTES):
                for line in splitter.feed(data):
                    yield line
            if not follow:
                break
            if (replacing := _replacing(path, opened)) is not None:
                for line in splitter.end():
                    yield line
                os.close(opened)
                opened = replacing
            else:
                await asyncio.sleep(LOOK_S)
    finally:
        os.close(opened)
    for line in splitter.end():
        yield line


async def lines_of_stdin(most_bytes: int) -> AsyncGenerator[bytes | None, None]:
    """Yield the lines of standard input to its end.

    A thread reads it, as not every kind of input can be waited for, and a read cannot be cancelled.
    """
    chunks: asyncio.Queue[bytes] = asyncio.Queue(1)
    loop = asyncio.get_running_loop()

    def read() -> None:
        data = b"?"
        with suppress(RuntimeError, CancelledError):  # the loop has ended
            while data:
                data = os.read(0, CHUNK_BYTES)
                asyncio.run_coroutine_threadsafe(chunks.put(data), loop).result()

    threading.Thread(target=read, daemon=True).start()
    splitter = Splitter(most_bytes)
    while data := await chunks.get():
        for line in splitter.feed(data):
            yield line
    for line in splitter.end():
        yield line


def _opened(path: str) -> int:
    """Open an ordinary file; raise Unusable for anything else, which could block for ever."""
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise Unusable(f"--requests: cannot read {path!r}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise Unusable(f"--requests: {path!r} is no ordinary file; give -, and let its lines come on standard input")
    return opened


def _replacing(path: str, opened: int) -> int | None:
    """Open the file anew if another one has its name, or if it was cut; None: it is the same."""
    try:
        named, known = os.stat(path), os.fstat(opened)
        is_same = (named.st_dev, named.st_ino) == (known.st_dev, known.st_ino)
        if is_same and named.st_size >= os.lseek(opened, 0, os.SEEK_CUR):
            return None
        return _opened(path)
    except (OSError, Unusable):  # it is gone for a moment, while logs are rotated
        return None
