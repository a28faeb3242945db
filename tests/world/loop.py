"""An event loop in virtual time: when nothing is ready, the time is that of the next timer.

asyncio runs what `call_soon` was given in that order, and promises it. Anything else may come in any order: timers that
are due at the same moment, and bytes from different connections. Here the seed decides it. A timer is never early, and
neither is one of a real loop; it is a little late, at a round time, at which others are due, too.
"""

import asyncio
import math
import random
import selectors
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from contextvars import Context, copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

if TYPE_CHECKING:
    from tests.world.network import Network

T = TypeVar("T")

BEGINNING_S = 1_000.0  # of the loop's time: zero stands for "never" in places
EPOCH_S = 1_800_000_000.0  # what the world's clocks on the wall show then
OFF = 0.3  # of a grain: at round times, whoever waits for the next one would wait for nothing, and time stand still
AT_ONCE_S = 0.5e-9  # the loop runs timers that differ by less in one pass, in their order
MAX_IN_A_THREAD_S = 0.02
SETTLES_S = 0.1  # after the end: what is under way then still arrives
MAX_PASSES = 50_000  # of the loop in one moment


class Livelock(Exception):
    """The loop has something to do again and again, and time does not go on."""


class Deadlock(Exception):
    """Nothing is ready, and no timer will ever change that."""


class _Jumps(selectors.SelectSelector):
    """Waits for nobody: it moves the time on instead. No descriptor is ever looked at."""

    now_s = BEGINNING_S
    _passes = 0  # without any time between them

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Deadlock(f"nothing will ever happen after {self.now_s - BEGINNING_S:.6f} s")
        self._passes = 0 if timeout > 0 else self._passes + 1
        if self._passes > MAX_PASSES:
            self._passes = 0
            raise Livelock(f"{MAX_PASSES:,} passes of the loop in one moment, {self.now_s - BEGINNING_S:.6f} s")
        self.now_s += max(0.0, timeout)
        return []


class WorldLoop(asyncio.SelectorEventLoop):
    """Its connections are those of `network`; what it would run in a thread, it runs itself a little later."""

    network: "Network"

    def __init__(self, chance: random.Random, grain_s: float = 1e-4) -> None:
        """`grain_s`: timers fire at multiples of it, so that many do so at once."""
        self._jumps = _Jumps()
        self._readers: dict[int, tuple[Callable[[], object], Context]] = {}  # by descriptors of this world
        self.chance = chance
        self._grain_s = grain_s
        self.clocks_s = [EPOCH_S]  # of the clocks on the wall at the loop's beginning; the last one counts
        super().__init__(self._jumps)

    def time(self) -> float:
        return self._jumps.now_s

    @property
    def elapsed_s(self) -> float:
        return self._jumps.now_s - BEGINNING_S

    def call_at(self, when: float, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        grain_s = self._grain_s
        grains = math.ceil((when - 2 * AT_ONCE_S) / grain_s - OFF)
        at_s = (grains + OFF) * grain_s + self.chance.random() * AT_ONCE_S
        return super().call_at(max(when, at_s), callback, *args, context=context)

    def run_in_executor(self, executor: object, func: Callable[..., T], *args: Any) -> "asyncio.Future[T]":  # type: ignore[override]
        del executor
        future: asyncio.Future[T] = self.create_future()

        def run() -> None:
            if future.done():
                return
            try:
                result = func(*args)
            except Exception as error:  # its future tells whoever waits
                future.set_exception(error)
            else:
                future.set_result(result)

        self.call_later(self.chance.random() * MAX_IN_A_THREAD_S, run)
        return future

    def add_reader(self, fd: Any, callback: Callable[..., object], *args: Any) -> None:  # type: ignore[override]
        self._readers[fd] = partial(callback, *args), copy_context()

    def remove_reader(self, fd: Any) -> bool:
        return self._readers.pop(fd, None) is not None

    def is_readable(self, fd: int) -> None:
        callback, context = self._readers[fd]
        self.call_soon(callback, context=context)

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:
        if options.get("ssl"):
            _beyond("TLS")
        return await self.network.connect(protocol_factory, str(host), int(port))

    async def create_server(self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:
        if options.get("ssl"):
            _beyond("TLS")
        if (bound := options.get("sock")) is not None:
            host, port = bound.getsockname()
            if (around := getattr(bound, "around", None)) is not None:  # the kernel's sockets have none
                protocol_factory = around(protocol_factory)
        return self.network.listen(protocol_factory, str(host), int(port))

    async def create_unix_connection(self, *_: Any, **__: Any) -> NoReturn:
        _beyond("a Unix socket")

    async def create_unix_server(self, *_: Any, **__: Any) -> NoReturn:
        _beyond("a Unix socket")

    async def subprocess_exec(self, *_: Any, **__: Any) -> NoReturn:
        _beyond("another process")


def _beyond(what: str) -> NoReturn:
    raise NotImplementedError(f"{what} is not part of this world yet")


@contextmanager
def clocks_of(loop: WorldLoop) -> Iterator[None]:
    """Let `time.time` tell the world's time: what is written is labelled with it."""
    real = time.time
    time.time = lambda: loop.clocks_s[-1] + loop.elapsed_s
    try:
        yield
    finally:
        time.time = real


def run(main: Coroutine[Any, Any, T], loop: WorldLoop) -> T:
    """Run it to its end; raise what is left over then as an AssertionError.

    The module-level generator of `random` draws what the world's chance says, too.
    """
    state = random.getstate()
    random.seed(loop.chance.getrandbits(64))
    asyncio.set_event_loop(loop)
    try:
        with clocks_of(loop):
            result = loop.run_until_complete(main)
            loop.run_until_complete(asyncio.sleep(SETTLES_S))
            left = leftovers(loop)
        assert not left, "left at the end: " + "; ".join(left)
        return result
    finally:
        random.setstate(state)
        _cancel_all(loop)
        loop.network.bury()
        asyncio.set_event_loop(None)
        loop.close()


def leftovers(loop: WorldLoop) -> list[str]:
    tasks = [f"the task {task.get_coro().__qualname__}" for task in asyncio.all_tasks(loop)]  # type: ignore[union-attr]
    timers = [f"the timer {handle!r}" for handle in loop._scheduled if not handle.cancelled()]  # type: ignore[attr-defined]
    return sorted(tasks) + sorted(timers) + loop.network.left()


def _cancel_all(loop: WorldLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    with suppress(Deadlock, Livelock):
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
