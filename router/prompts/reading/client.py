"""The router's side of its reading processes: starts them, sends them large bodies, kills them on a timeout."""

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias, cast

from api.errors import ApiError, queue_full
from api.http.bodies import MEDIUM_BYTES
from router.prompts.reading.messages import (
    LENGTH,
    OUT_OF_MEMORY,
    Body,
    Found,
    FromProcess,
    Leave,
    Made,
    Make,
    Refused,
    Salt,
    ToProcess,
    decode_from_process,
    framed,
)

QUICK_BODY_BYTES = 24 * 1024  # always parsed in the event loop
# The most that a longer body may have to be read there, too. A comma or a bracket within a text counts as well.
LONG_BODY_BYTES = 256 * 1024
MAX_COMMAS = 32 * 1024
MAX_NESTED = 4 * 1024  # lists and objects
LONG_EVENT_BYTES = 4 * 1024 * 1024  # a replica's first event may have the token ids of a long prompt
READ_LIMIT_S = 20.0
PIPE_BYTES = 1024 * 1024  # an answer's bytes that wait before more is read

TOO_COSTLY = Refused(
    413,
    f"the body could not be read within {READ_LIMIT_S:g} s and the memory for one body; send less",
    "invalid_request_error",
    None,
    "body_too_costly",
    {},
)
PROCESS_LOST = Refused(
    503,
    "the reader of large bodies died twice on this body; try again",
    "service_unavailable",
    None,
    "reading_failed",
    {"Retry-After": "1"},
)
log = logging.getLogger(__name__)

Wanted: TypeAlias = Make | Salt | None


def is_quick(body: bytes | bytearray) -> bool:
    """Tell whether the body can be parsed within milliseconds, judged by its size and the number of its values."""
    if len(body) <= QUICK_BODY_BYTES:
        return True
    if len(body) > LONG_BODY_BYTES or (len(body) > MAX_COMMAS and body.count(b",") > MAX_COMMAS):
        return False
    return body.count(b"[") + body.count(b"{") <= MAX_NESTED


def is_quick_event(event: bytes) -> bool:
    """The same for an event of a replica's stream, which may have more numbers than a body of a client."""
    if len(event) <= QUICK_BODY_BYTES:
        return True
    return len(event) <= LONG_EVENT_BYTES and event.count(b"[") + event.count(b"{") <= MAX_NESTED


class Reading:
    """Two processes, for medium and for large bodies, each reading one body at a time."""

    def __init__(self, wait_s: float) -> None:
        self._medium = _Lane(wait_s)
        self._large = _Lane(wait_s)

    async def read(
        self, body: bytes, want: Callable[[Found], Wanted], *, whole: bool = True, names: bool = False
    ) -> Made | None:
        """Parse a body. `want` is called with the fields found, and returns a request for the result.

        None: `want` did not want anything. ApiError: it may not be read, or cannot within the limits.
        """
        lane = self._medium if len(body) <= MEDIUM_BYTES else self._large
        answer = await lane.read(body, Body(len(body), whole, names), want)
        if isinstance(answer, Refused):
            raise answer.error()
        return answer

    async def found(self, body: bytes | bytearray) -> Found:
        """Parse a body for its fields and the stored responses that it names; ApiError as of `read`."""
        found = Found({}, chat=False)

        def note(told: Found) -> None:
            nonlocal found
            found = told

        await self.read(cast(bytes, body), note, whole=False, names=True)
        return found

    async def close(self) -> None:
        await self._medium.close()
        await self._large.close()


class _Lane:
    """One process. No exception leaves its tasks, because the frames of a traceback would keep the body alive."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None

    async def read(self, body: bytes, about: Body, want: Callable[[Found], Wanted]) -> Made | Refused | None:
        try:
            async with asyncio.timeout(self._wait_s):
                await self._turn.acquire()
        except TimeoutError:
            return Refused.of(queue_full(f"other large bodies came first for {self._wait_s:g} s; try again", 1))

        async def in_turn() -> Made | Refused | None:
            try:
                answer = await self._tried(body, about, want)
                return answer if answer is not PROCESS_LOST else await self._tried(body, about, want)
            finally:
                self._turn.release()

        # It is read to its end even if its client leaves: a process that is ended has to be started again.
        return await asyncio.shield(asyncio.create_task(in_turn()))

    async def _tried(self, body: bytes, about: Body, want: Callable[[Found], Wanted]) -> Made | Refused | None:
        """The response of the process; PROCESS_LOST if it died, which this body need not have caused."""
        answer: Made | Refused | None = TOO_COSTLY
        try:
            async with asyncio.timeout(READ_LIMIT_S):
                process = self._process
                if process is None or process.returncode is not None:
                    safe = [] if "" in sys.path or os.getcwd() in sys.path else ["-P"]
                    command = [sys.executable, *safe, "-m", "router.prompts.reading.process", str(os.getpid())]
                    pipe = asyncio.subprocess.PIPE
                    process = self._process = await asyncio.create_subprocess_exec(
                        *command, stdin=pipe, stdout=pipe, limit=PIPE_BYTES, start_new_session=True
                    )
                try:
                    answer = await self._asked(process, body, about, want)
                except (EOFError, ConnectionError) as error:
                    code = await process.wait()
                    log.warning("The reader of large bodies ended with code %d: %s", code, error)
                    answer = TOO_COSTLY if code == OUT_OF_MEMORY else PROCESS_LOST
        except TimeoutError:
            pass
        finally:
            if answer is TOO_COSTLY or answer is PROCESS_LOST:
                await self.close()  # its state is unknown
        return answer

    async def _asked(
        self, process: asyncio.subprocess.Process, body: bytes, about: Body, want: Callable[[Found], Wanted]
    ) -> Made | Refused | None:
        await _send(process, about, body)
        found = await _received(process)
        if not isinstance(found, Found):
            return found
        try:
            wanted = want(found)
        except ApiError as error:
            await _send(process, Leave())
            return Refused.of(error)
        await _send(process, wanted or Leave())
        if wanted is None:
            return None
        made = await _received(process)
        assert not isinstance(made, Found), made
        return made

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        assert process.stdin is not None
        process.stdin.close()


async def _send(process: asyncio.subprocess.Process, message: ToProcess, body: bytes = b"") -> None:
    assert process.stdin is not None
    for data in (framed(message), body):
        if process.stdin.is_closing():  # uvloop's write() would raise a RuntimeError there
            raise BrokenPipeError("it has closed its standard input")
        if data:
            process.stdin.write(data)
    await process.stdin.drain()


async def _received(process: asyncio.subprocess.Process) -> FromProcess:
    assert process.stdout is not None
    [length] = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
    message: FromProcess = decode_from_process(await process.stdout.readexactly(length))
    return message
