"""The other workers of the same router, asked through sockets in a folder that only this user may enter.

A worker that is asked about the whole router asks its colleagues, too (`router/http/one_answer.py`); they answer by
their own app. Workers have questions of their own as well (`questions`). One that does not answer in time is left out.
"""

import asyncio
import logging
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Generic, TypeVar

from msgspec import Struct, msgpack

from router.workers.processes import Place

log = logging.getLogger(__name__)

ANSWER_S, CHANGE_S = 3.0, 30.0  # the time to tell, and to do what takes replicas their time
MAX_BYTES = 256 * 2**20  # the most bytes of a message
SIZE = struct.Struct("!I")

T = TypeVar("T")


class Asked(Struct, frozen=True):
    """A client's request, which this worker has admitted."""

    method: str
    raw_path: bytes
    query: bytes
    body: bytes
    sees_all: bool  # the sender is an administrator


class Told(Struct, frozen=True):
    """A question on its way."""

    question: str
    about: bytes = b""  # packed


class Answer(Struct):
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Question(Struct, Generic[T], frozen=True):
    """`answer` is the type of what colleagues tell."""

    name: str
    answer: type[T]


REQUEST = Question("request", Answer)  # about an Asked

_decode = msgpack.Decoder(Told).decode


class Colleagues:
    def __init__(self, place: Place) -> None:
        self.place = place
        self._path = place.folder / f"worker-{place.number}"
        self._others = {number: place.folder / f"worker-{number}" for number in range(place.workers)}
        del self._others[place.number]

    # ---- asking

    async def told(self, question: Question[T], about: object = None, within_s: float = ANSWER_S) -> dict[int, T]:
        """Their answers, by their numbers."""
        message, answer = msgpack.encode(Told(question.name, msgpack.encode(about))), question.answer
        answers = await asyncio.gather(*(self._ask(number, message, answer, within_s) for number in self._others))
        return {number: answer for number, answer in zip(self._others, answers, strict=True) if answer is not None}

    async def _ask(self, number: int, message: bytes, answer: type[T], within_s: float) -> T | None:
        try:
            async with asyncio.timeout(within_s):
                reader, writer = await asyncio.open_unix_connection(str(self._others[number]))
                try:
                    writer.write(SIZE.pack(len(message)) + message)
                    return msgpack.decode(await _read(reader), type=answer)
                finally:
                    writer.close()
        except FileNotFoundError:
            return None  # it has never run
        except (OSError, EOFError, TimeoutError, ValueError) as error:  # it has just ended, and another one starts
            log.warning("worker %d does not answer, and is left out: %r", number, error)
            return None

    # ---- answering

    async def serve(self, tell: Callable[[Told], Awaitable[object]]) -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                with suppress(OSError, EOFError, TimeoutError):
                    async with asyncio.timeout(CHANGE_S):
                        message = msgpack.encode(await tell(_decode(await _read(reader))))
                        writer.write(SIZE.pack(len(message)) + message)
                        await writer.drain()
            except Exception:  # any mistake here costs one answer
                log.exception("Internal error while answering another worker")
            finally:
                writer.close()

        self._path.unlink(missing_ok=True)  # the worker before may have left it
        async with await asyncio.start_unix_server(answer, str(self._path)) as server:
            await server.serve_forever()


async def _read(reader: asyncio.StreamReader) -> bytes:
    (size,) = SIZE.unpack(await reader.readexactly(SIZE.size))
    if size > MAX_BYTES:
        raise ValueError(f"another worker sends {size:,} bytes")
    return await reader.readexactly(size)


def about(told: Told, kind: type[T]) -> T:
    return msgpack.decode(told.about, type=kind)
