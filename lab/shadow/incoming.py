"""Requests as they come: lines of a file or of standard input, and mirrored copies over HTTP."""

import asyncio
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from itertools import chain
from typing import Annotated, BinaryIO

import msgspec
from msgspec import Meta, Raw, Struct, field
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from api.errors import ApiError
from api.generation_apis import PATHS
from api.http.bodies import Bodies
from api.http.responses import error_response
from api.process.settings import Unusable
from router.http.endpoints import body_of
from router.log_lines import NO_BODY
from router.members.upstream import Header

STDIN = "-"
MAX_S = 1e12  # seconds since 1970
MAX_TOKENS = 10**9
NO_BODIES = "without its body a request cannot be placed; write the log with --log-prompts"
EXPECTED = 'write {"ts": seconds, "path": "/v1/chat/completions", "body": {...}}'

Name = Annotated[str, Meta(max_length=512)]
Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Seconds = Annotated[float, Meta(ge=-MAX_S, le=MAX_S)]


class BadLine(ValueError):
    """A line without a request that can be placed."""


class Incoming(Struct, frozen=True, kw_only=True):
    """A request; the lines of a router's request log are some."""

    raw_body: Raw = field(default=NO_BODY, name="body")
    ts: Seconds | None = None  # its arrival, seconds since 1970; None: it has just come
    path: Name = ""  # empty: the body's fields tell the API
    request_id: Name = ""
    replica: Name | None = None  # the replica that served it
    cached_tokens: Tokens | None = None  # the replica's figure
    output_tokens: Tokens | None = None
    ttft_s: Seconds | None = None

    @property
    def body(self) -> bytes:
        return bytes(self.raw_body)


_decode = msgspec.json.Decoder(Incoming).decode


def parse_line(line: bytes) -> Incoming:
    try:
        read = _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadLine(f"it is no request: {error}; {EXPECTED}") from error
    if not read.raw_body:
        raise BadLine(f"it has no body; {NO_BODIES}")
    return read


async def lines_of(path: str, most_bytes: int) -> AsyncGenerator[bytes | None, None]:
    """Yield the lines of a file or of standard input to its end, and None for one that is too long.

    A thread reads them, as not every kind of input can be waited for, and a read cannot be cancelled.
    """
    file = open(0, "rb", closefd=False) if path == STDIN else _opened(path)  # noqa: SIM115  # the thread closes it
    found: asyncio.Queue[bytes | None] = asyncio.Queue(1)
    loop = asyncio.get_running_loop()

    def read() -> None:
        with file, suppress(RuntimeError, CancelledError):  # the loop has ended
            for line in chain(_lines(file, most_bytes), (b"",)):
                asyncio.run_coroutine_threadsafe(found.put(line), loop).result()

    threading.Thread(target=read, daemon=True).start()
    while (line := await found.get()) != b"":
        yield line


def _opened(path: str) -> BinaryIO:
    """Open an ordinary file; raise Unusable for anything else, which could block for ever."""
    try:
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    except OSError as error:
        raise Unusable(f"--requests: cannot read {path!r}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise Unusable(f"--requests: {path!r} is no ordinary file; give -, and let its lines come on standard input")
    return file


def _lines(file: BinaryIO, most_bytes: int) -> Iterator[bytes | None]:
    while line := file.readline(most_bytes + 1):
        is_too_long = len(line) > most_bytes and not line.endswith(b"\n")
        while is_too_long and line and not line.endswith(b"\n"):
            line = file.readline(most_bytes)
        if is_too_long:
            yield None
        elif not line.isspace():
            yield line


MAX_ID_CHARS = 128
REPLICA = "x-warmroute-replica"  # a header that names the replica to which the original goes
REQUEST_ID = "x-request-id"


def mirror(
    take: Callable[[Incoming, Sequence[Header]], Awaitable[object]],
    most_body_bytes: int,
    most_bytes: int,
    skipped: Counter[str],
) -> ASGIApp:
    """Return an app whose answers matter to nobody: senders of copies do not wait for them.

    `most_bytes`: of all bodies together.
    """
    bodies = Bodies(most_bytes)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        answer = Response(status_code=204)
        if request.method == "POST" and scope["path"] in PATHS:
            ts = time.time()
            try:
                async with body_of(request, most_body_bytes, bodies) as body:
                    copy = Incoming(
                        raw_body=Raw(body),
                        ts=ts,
                        path=scope["path"],
                        request_id=request.headers.get(REQUEST_ID, "")[:MAX_ID_CHARS],
                        replica=request.headers.get(REPLICA),
                    )
                    await take(copy, request.headers.raw)
            except ApiError as error:
                skipped["too large" if error.status == 413 else "no room" if error.status == 429 else "bad"] += 1
                answer = error_response(error)
                answer.headers["connection"] = "close"  # the rest of it is not read
            except ClientDisconnect:
                skipped["cut off"] += 1
                return
        await answer(scope, receive, send)

    return app
