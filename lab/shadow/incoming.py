"""Requests as they come: lines of a file as they are written or of standard input, and mirrored copies over HTTP."""

import asyncio
import os
import stat
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct, field
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.errors import ApiError
from api.generation_apis import PATHS
from api.http.bodies import Bodies
from api.http.responses import error_response
from api.process.settings import Unusable
from router.http.endpoints import body_of
from router.log_lines import NO_BODY
from router.members.upstream import Header

MAX_S = 1e12  # since 1970
MAX_TOKENS = 10**9
NO_BODIES = "without its body a request cannot be placed; write the log with --log-prompts"
EXPECTED = 'write {"ts": seconds, "path": "/v1/chat/completions", "body": {...}}'

Name = Annotated[str, Meta(max_length=512)]
Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Seconds = Annotated[float, Meta(ge=-MAX_S, le=MAX_S)]


class BadLine(ValueError):
    """A line without a request that can be placed."""


class Served(Struct, frozen=True, kw_only=True):
    """The fields of a line, beside its time and its body: those of a router's request log are among them."""

    path: Name = ""  # empty: the body's fields tell the API
    request_id: Name = ""
    replica: Name | None = None  # the replica that served it
    cached_tokens: Tokens | None = None  # the replica's figure
    output_tokens: Tokens | None = None
    ttft_s: Seconds | None = None


class _Line(Served, frozen=True, kw_only=True):
    raw_body: Raw = field(default=NO_BODY, name="body")
    ts: Seconds | None = None


class Incoming(Served, frozen=True, kw_only=True):
    ts: float  # its arrival, seconds since 1970
    body: bytes
    headers: Sequence[Header] = ()


_decode = msgspec.json.Decoder(_Line).decode


def parse_line(line: bytes, now_ts: float) -> Incoming:
    """Parse a line; one that does not say when its request came has just come. Raise BadLine."""
    try:
        read = _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadLine(f"it is no request: {error}; {EXPECTED}") from error
    if not read.raw_body:
        raise BadLine(f"it has no body; {NO_BODIES}")
    told = {name: getattr(read, name) for name in Served.__struct_fields__}
    return Incoming(ts=now_ts if read.ts is None else read.ts, body=bytes(read.raw_body), **told)


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


MAX_QUEUED = 4096
MAX_ID_CHARS = 128
REPLICA = "x-warmroute-replica"  # a header that names the replica to which the original goes
REQUEST_ID = "x-request-id"


class Mirror:
    """An ASGI app whose answers matter to nobody: senders of copies do not wait for them."""

    def __init__(
        self, most_body_bytes: int, most_bytes: int, skipped: Counter[str], *, most_queued: int = MAX_QUEUED
    ) -> None:
        """`most_bytes`: of all bodies that are being received, and again of all that are queued."""
        self._most_body_bytes = most_body_bytes
        self._most_bytes = most_bytes
        self._bodies = Bodies(most_bytes)
        self._most_queued = most_queued
        self._skipped = skipped
        self._queue: deque[Incoming] = deque()
        self._queued_bytes = 0
        self._has_some = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        answer = Response(status_code=204)
        if request.method == "POST" and scope["path"] in PATHS:
            try:
                async with body_of(request, self._most_body_bytes, self._bodies) as body:
                    self._offer(request, body)
            except ApiError as error:
                self._skipped["too large" if error.status == 413 else "no room" if error.status == 429 else "bad"] += 1
                answer = error_response(error)
                answer.headers["connection"] = "close"  # the rest of it is not read
            except ClientDisconnect:
                self._skipped["cut off"] += 1
                return
        await answer(scope, receive, send)

    async def take(self) -> Incoming:
        """Wait for the next copy."""
        while not self._queue:
            self._has_some.clear()
            await self._has_some.wait()
        taken = self._queue.popleft()
        self._queued_bytes -= len(taken.body)
        return taken

    def end(self) -> None:
        """Count what is still queued as skipped."""
        if self._queue:
            self._skipped["left in the queue"] += len(self._queue)
            self._queue.clear()

    def _offer(self, request: Request, body: bytes) -> None:
        if len(self._queue) >= self._most_queued or self._queued_bytes + len(body) > self._most_bytes:
            self._skipped["no room"] += 1
            return
        self._queued_bytes += len(body)
        self._queue.append(
            Incoming(
                ts=time.time(),
                body=body,
                path=request.scope["path"],
                headers=request.headers.raw,
                request_id=request.headers.get(REQUEST_ID, "")[:MAX_ID_CHARS],
                replica=request.headers.get(REPLICA),
            )
        )
        self._has_some.set()
