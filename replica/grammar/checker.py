"""The HTTP process's end of the trial: constraints are compiled in a child, which is killed if one takes too long."""

import asyncio
import hashlib
import logging
import os
import re
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec

import msgspec

from api.errors import ApiError, invalid, queue_full
from api.openai.constraints import Asked, Constraint
from api.process.lifeline import module

LENGTH_BYTES = 4
LIMIT_S = 5.0  # the time for one constraint, by the clock
STARTING_LIMIT_S = 60.0  # the child's time to start, on a machine that does much else
MAX_WAITING = 64
TOO_MUCH = "it takes too much memory, or is nested too deeply; simplify it"
# Reasons that are limits, the compiler's own words among them.
LIMITS = {
    "time": re.compile(r"\Ait takes (?:more than )?[\d.]+ s"),
    "size": re.compile(r"too much memory|MiB when compiled|too many expressions|items; max is|recursion limit|fuel"),
}
REMEMBERED = 1024  # constraints, accepted or refused

log = logging.getLogger(__name__)


class Checker:
    """One child, started with the first constraint."""

    def __init__(
        self, vocabulary: Callable[[], bytes], reached: Counter[str] | None = None, limit_s: float = LIMIT_S
    ) -> None:
        self.reached: Counter[str] = Counter() if reached is None else reached  # requests that met a limit
        self._make_vocabulary = vocabulary
        self._limit_s = limit_s
        self._vocabulary: bytes | None = None
        self._child: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._reasons: OrderedDict[bytes, str] = OrderedDict()

    async def vocabulary(self) -> bytes:
        if self._vocabulary is None:
            self._vocabulary = await asyncio.to_thread(self._make_vocabulary)
        return self._vocabulary

    async def check(self, asked: Asked) -> None:
        """Raise ApiError 400 with the reason if the constraint is refused, 429 if too many wait."""
        name = hashlib.sha256(msgspec.msgpack.encode(asked.constraint)).digest()
        reason = self._reasons.get(name)
        if reason is None:
            if self._waiting >= MAX_WAITING:
                self.reached["waiting"] += 1
                raise queue_full(f"{self._waiting} constraints wait to be compiled, and no more may; try again", 1)
            self._waiting += 1
            # It is tried to its end even if its client leaves: a child that is ended has to be started again.
            reason = await asyncio.shield(asyncio.create_task(self._in_turn(name, asked.constraint)))
        if reason:
            self.reached.update(name for name, words in LIMITS.items() if words.search(reason))
            raise invalid(f"{asked.param} cannot be compiled: {reason}", asked.param)

    async def _in_turn(self, name: bytes, constraint: Constraint) -> str:
        try:
            async with self._turn:
                reason = self._reasons.get(name)
                if reason is None:
                    reason = await self._tried(constraint)
                    if reason is None:  # perhaps another one, or the system, has ended the child
                        reason = await self._tried(constraint)
                    self._reasons[name] = reason = TOO_MUCH if reason is None else reason
                    if len(self._reasons) > REMEMBERED:
                        self._reasons.popitem(last=False)
        finally:
            self._waiting -= 1
        return reason

    async def _tried(self, constraint: Constraint) -> str | None:
        """Return the reason; None if the child has died."""
        if self._child is None:
            if find_spec("llguidance") is None:
                message = "llguidance is not installed here, which constrains answers; install 'warmroute[replica]'"
                raise ApiError(501, message, "server_error", code="not_installed")
            vocabulary = await self.vocabulary()
            command, pipe = module("replica.grammar.trial", str(os.getpid())), asyncio.subprocess.PIPE
            self._child = await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, start_new_session=True
            )
            # The first answer says that it has started, which takes longer than to compile.
            async with asyncio.timeout(STARTING_LIMIT_S):
                await _send(self._child, vocabulary)
                await _send(self._child, msgspec.msgpack.encode(Constraint("json_object", "")))
                await _received(self._child)
        child = self._child
        try:
            async with asyncio.timeout(self._limit_s):
                await _send(child, msgspec.msgpack.encode(constraint))
                return (await _received(child)).decode()
        except TimeoutError:
            await self.close()
            return f"it takes more than {self._limit_s:g} s; simplify it"
        except (asyncio.IncompleteReadError, ConnectionError):
            log.warning("a constraint ended the process that tried it, with status %s", await child.wait())
            await self.close()
            return None

    async def close(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        with suppress(ProcessLookupError):
            child.kill()
        await child.wait()
        assert child.stdin is not None
        child.stdin.close()


async def _send(child: asyncio.subprocess.Process, message: bytes) -> None:
    assert child.stdin is not None
    if child.stdin.is_closing():
        raise BrokenPipeError("it has closed its standard input")
    child.stdin.write(len(message).to_bytes(LENGTH_BYTES, "little") + message)
    await child.stdin.drain()


async def _received(child: asyncio.subprocess.Process) -> bytes:
    assert child.stdout is not None
    length = int.from_bytes(await child.stdout.readexactly(LENGTH_BYTES), "little")
    return await child.stdout.readexactly(length)
