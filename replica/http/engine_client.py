"""The HTTP process's end of the pair: starts the engine's process, submits requests, distributes outputs.

Everything here runs on the event loop's thread. The socket is read by file descriptor: zmq.asyncio makes futures of
every message, and took twice the CPU (80 against 37 us for one with 16 outputs, decoding included).
"""

import asyncio
import contextlib
import itertools
import os
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import zmq

from api.process.lifeline import module
from api.process.own_folder import OwnFolder
from events.native import Load
from replica import messages
from replica.config import EngineConfig
from replica.messages import Output

MAX_BYTES = 512 * 2**20  # the size of all answers
MAX_BYTES_EACH = 128 * 2**20
SMALL_BYTES = 2**20  # there is always room for an answer of this size: the number of requests is limited
# The most that a token, and each log probability with it, takes: from the engine, as text, and in JSON.
TOKEN_BYTES = 400
LOGPROB_BYTES = 400


class NoRoom(Exception):
    """Answers would take more than they may: this one (`alone`), or all together."""

    def __init__(self, message: str, *, alone: bool) -> None:
        super().__init__(message)
        self.alone = alone


class HeldAnswers:
    def __init__(self) -> None:
        self.used_bytes = 0


class HeldAnswer:
    """One answer; `release` it."""

    __slots__ = ("_all", "_bytes")

    def __init__(self, answers: HeldAnswers) -> None:
        self._all = answers
        self._bytes = 0

    def add(self, output: Output) -> None:
        """Raise NoRoom if that is too much."""
        count = TOKEN_BYTES * len(output.token_ids)
        for each in output.logprobs or ():
            count += LOGPROB_BYTES * (len(each.top) + 1)
        self._bytes += count
        self._all.used_bytes += count
        if self._bytes > MAX_BYTES_EACH:
            fix = "ask for fewer choices, tokens or log probabilities, or stream the answer and read on"
            raise NoRoom(f"the answer takes more than {MAX_BYTES_EACH:,} bytes that wait; {fix}", alone=True)
        if self._all.used_bytes > MAX_BYTES and self._bytes > SMALL_BYTES:
            fix = "try again, or stream the answer and read on"
            raise NoRoom(f"answers in progress take more than {MAX_BYTES:,} bytes; {fix}", alone=False)

    def release(self) -> None:
        self._all.used_bytes -= self._bytes
        self._bytes = 0


LOADING_LIMIT_S = 1800.0  # a large model from a slow disk
STOPPING_LIMIT_S = 5.0
MESSAGES_PER_TURN = 64  # then the other callbacks of the loop have their turn


class EngineDied(Exception):
    """The engine's process is gone, and every request with it."""


class EngineRefused(Exception):
    """The engine did not take the request: it is full, or the request can never fit."""

    def __init__(self, refused: messages.Refused) -> None:
        super().__init__(refused.message)
        self.reason = refused.reason
        self.message = refused.message
        self.retry_after_s = refused.retry_after_s


class OutputStream:
    """The engine's outputs for one HTTP request, as they come. `whole`: what was read is kept until it is closed."""

    def __init__(self, engine: "EngineClient", ids: Iterable[int], *, whole: bool) -> None:
        self.open = set(ids)  # those that more can come for
        self._engine = engine
        self._arrived: list[messages.Output] = []
        self._held = HeldAnswer(engine.held_answers)
        self._whole = whole
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> list[messages.Output]:
        """Wait for outputs; return all there are, or none once every submit has ended."""
        while not self._arrived:
            if self._failure is not None:
                raise self._failure
            if not self.open:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        arrived, self._arrived = self._arrived, []
        if not self._whole:
            self._held.release()
        return arrived

    @property
    def complete(self) -> bool:
        """True if `next` would return nothing."""
        return not (self.open or self._arrived or self._failure)

    def cancel(self, *ids: int) -> None:
        """Cancel these; their outputs are no longer wanted."""
        wanted = self.open.intersection(ids)
        self.open -= wanted
        self._engine.forget(wanted)
        self._wake()

    def close(self) -> None:
        """Cancel what is running and drop pending outputs; the request's blocks are free within one step."""
        self._arrived.clear()
        self._held.release()
        self.cancel(*self.open)

    def arrive(self, output: messages.Output) -> None:
        try:
            self._held.add(output)
        except NoRoom as failure:
            self.close()
            self.fail(failure)
            return
        self._arrived.append(output)
        if output.finish_reason is not None:
            self.open.discard(output.id)
        self._wake()

    def fail(self, failure: Exception) -> None:
        self._failure = failure
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient:
    def __init__(self, process: asyncio.subprocess.Process, socket: "zmq.Socket[bytes]", folder: OwnFolder) -> None:
        loop = asyncio.get_running_loop()
        self.hello: messages.Hello | None = None
        self.stats = messages.Stats(load=Load(), pool=messages.PoolSnapshot(), rates=messages.Rates())
        self._process = process
        self._socket = socket
        self._folder = folder
        self._loop = loop
        self._ids = itertools.count(1)
        self._streams: dict[int, OutputStream] = {}
        self.held_answers = HeldAnswers()
        self._resets: dict[int, asyncio.Future[bool]] = {}
        self._greeted: asyncio.Future[messages.Hello] = loop.create_future()
        self._heard_s = loop.time()
        self._read_soon = False
        self._has_vocabulary = False
        self._fd = socket.fileno()
        loop.add_reader(self._fd, self._read)
        self._death = loop.create_task(self._watch())

    @classmethod
    async def spawn(cls, config: EngineConfig, command: Sequence[str] | None = None) -> "EngineClient":
        """Start the process, which begins to load the model; `ready` waits for it."""
        folder = OwnFolder("warmroute-engine-")
        endpoint = f"ipc://{folder.path}/engine"
        context = zmq.Context()
        socket = context.socket(zmq.PAIR)
        socket.linger = 0
        socket.set_hwm(0)  # the requests that HTTP has accepted bound the queue
        try:
            try:
                socket.bind(endpoint)
            except zmq.ZMQError as error:
                raise OSError(
                    f"cannot bind {endpoint}: {error.strerror}; set TMPDIR to a short path that can be written"
                ) from error
            command = [*(command or engine_command()), endpoint, str(os.getpid())]
            # A file, as writing to a pipe can fail: a child that dies at once is what `_watch` is there for.
            with tempfile.TemporaryFile() as given:
                given.write(msgspec.msgpack.encode(config))
                given.seek(0)
                # A session of its own: Ctrl-C in a terminal is for the HTTP process, which drains.
                process = await asyncio.create_subprocess_exec(*command, stdin=given, start_new_session=True)
        except BaseException:
            context.destroy()
            folder.close()
            raise
        return cls(process, socket, folder)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._death.done()

    @property
    def has_said_why(self) -> bool:
        """True if the engine could not start and has printed the reason on stderr."""
        return self.hello is None and self._process.returncode == 1

    @property
    def silent_s(self) -> float:
        """Since the last Stats; a running engine sends them four times a second."""
        return self._loop.time() - self._heard_s

    async def ready(self, limit_s: float = LOADING_LIMIT_S) -> messages.Hello:
        """Wait for the engine's Hello; raise EngineDied if it ends first or is silent for too long."""
        try:
            async with asyncio.timeout(limit_s):
                return await asyncio.shield(self._greeted)
        except TimeoutError:
            raise EngineDied(f"the engine was silent for {limit_s:g} s") from None

    async def died(self) -> str:
        """Wait for the process to end, and return the reason."""
        return await asyncio.shield(self._death)

    def new_id(self) -> int:
        return next(self._ids)

    def learn(self, vocabulary: bytes) -> None:
        """Give the engine the vocabulary that constraints are compiled for; the first time alone."""
        if not self._has_vocabulary:
            self._has_vocabulary = True
            self._send(messages.Learn(vocabulary))

    def submit(self, submits: Sequence[messages.Submit], *, whole: bool = False) -> OutputStream:
        """Submit one HTTP request's work to the engine; the ids are from `new_id`."""
        stream = OutputStream(self, (submit.id for submit in submits), whole=whole)
        if self._death.done():
            stream.fail(EngineDied(self._death.result()))
            return stream
        self._streams.update(dict.fromkeys((submit.id for submit in submits), stream))
        self._send(messages.SubmitAll(list(submits)))
        return stream

    def forget(self, ids: Iterable[int]) -> None:
        running = [id for id in ids if self._streams.pop(id, None) is not None]
        if running:
            self._send(messages.Cancel(running))

    async def reset(self) -> bool:
        """Empty the cache; return False if blocks are in use."""
        if self._death.done():
            raise EngineDied(self._death.result())
        reset = messages.Reset(self.new_id())
        done: asyncio.Future[bool] = self._loop.create_future()
        self._resets[reset.id] = done
        self._send(reset)
        return await done

    async def close(self) -> None:
        if not self._death.done():
            self._send(messages.Stop())
            try:
                # While the engine loads its model, it reads no messages and has no requests.
                await asyncio.wait_for(self.died(), 0 if self.hello is None else STOPPING_LIMIT_S)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self.died()
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close()
            self._socket.context.term()
        self._folder.close()

    def _send(self, message: messages.ToEngine) -> None:
        if self._socket.closed:
            return
        with contextlib.suppress(zmq.Again):  # nobody connected: the process is gone, `_watch` tells everyone
            self._socket.send(messages.encode(message), zmq.NOBLOCK)
        # Sending may swallow the edge that would have announced a message: look once more.
        if not self._read_soon:
            self._read_soon = True
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._read_soon = False
        for _ in range(MESSAGES_PER_TURN):
            if self._socket.closed:
                return
            try:
                raw = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            match message := messages.decode_from_engine(raw):
                case messages.Outputs(outputs):
                    for output in outputs:
                        stream = self._streams.get(output.id)
                        if stream is not None:  # or it was cancelled meanwhile
                            if output.finish_reason is not None:
                                del self._streams[output.id]
                            stream.arrive(output)
                case messages.Stats():
                    self.stats = message
                    self._heard_s = self._loop.time()
                case messages.Refused(id):
                    stream = self._streams.pop(id, None)
                    if stream is not None:
                        stream.open.discard(id)
                        stream.fail(EngineRefused(message))
                case messages.ResetDone(id, done):
                    asked = self._resets.pop(id, None)
                    if asked is not None and not asked.done():
                        asked.set_result(done)
                case messages.Loading():
                    self._folder.close()  # the connected sockets live on, and nothing is left behind whoever dies how
                case messages.Hello():
                    self.hello = message
                    self._heard_s = self._loop.time()
                    if not self._greeted.done():
                        self._greeted.set_result(message)
        self._read_soon = True
        self._loop.call_soon(self._read)

    async def _watch(self) -> str:
        status = await self._process.wait()
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        ending = f"the engine's process {how}"
        if not self._socket.closed:
            self._read()  # its last words
        failure = EngineDied(ending)
        for stream in set(self._streams.values()):
            stream.fail(failure)
        self._streams.clear()
        waiting: list[asyncio.Future[Any]] = [self._greeted, *self._resets.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(failure)
                future.exception()  # looked at, so that a future nobody waits for is no warning
        self._resets.clear()
        return ending


def engine_command() -> list[str]:
    return module("replica.process")
