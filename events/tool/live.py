"""Follows live streams until a condition, a time or Ctrl-C."""

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import click
from msgspec import Struct, field

from events.messages import Frames
from events.native import Status
from events.source import Source
from events.subscriber import Subscriber, Tap
from events.view import CacheView

NOTICE_AFTER_S = 3.0
LOOK_EVERY_S = 0.02


class Ending(Enum):
    """The reason for an end; all but TIMEOUT are as the user wanted."""

    DONE = "done"
    TIME = "time"
    STOPPED = "stopped"
    TIMEOUT = "timeout"


class Followed(Struct):
    """One stream with the view it feeds."""

    source: Source
    view: CacheView
    on_status: Callable[[Status], None] | None = None
    tap: Tap | None = None


def follow(
    streams: Sequence[Followed],
    *,
    until: Callable[[], bool] | None = None,
    for_s: float | None = None,
    timeout_s: float | None = None,
    every: Callable[[], None] | None = None,
    every_s: float = 0.25,
) -> Ending:
    """Run until `until()` is true (DONE), `for_s` is over (TIME), Ctrl-C or SIGTERM (STOPPED), or `timeout_s` is over.

    `every` is called now and then, to draw or flush. An exception of any of the callbacks ends it too.
    """
    return asyncio.run(_Follow(streams, until, for_s, timeout_s, every, every_s).run())


class _Follow(Struct):
    streams: Sequence[Followed]
    until: Callable[[], bool] | None
    for_s: float | None
    timeout_s: float | None
    every: Callable[[], None] | None
    every_s: float
    connected: set[str] = field(default_factory=set)
    stopped: bool = False
    failure: BaseException | None = None

    async def run(self) -> Ending:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._failed)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        async with Subscriber() as subscriber:
            for stream in self.streams:
                subscriber.add(stream.source, stream.view, on_status=stream.on_status, tap=self._tap(stream))
            return await self._wait()

    def _tap(self, stream: Followed) -> Tap:
        def tap(socket: str, frames: Frames) -> None:
            if socket == "connected":
                self.connected.add(stream.source.name)
            if stream.tap is not None:
                stream.tap(socket, frames)

        return tap

    def _stop(self) -> None:
        self.stopped = True

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback of the loop raised: without this, asyncio would only log it."""
        error = context.get("exception")
        if isinstance(error, BaseException):
            self.failure = self.failure or error
        else:
            loop.default_exception_handler(context)

    async def _wait(self) -> Ending:
        started_s = called_s = time.monotonic()
        noticed = False
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if self.failure is not None:
                raise self.failure
            now_s = time.monotonic()
            if self.every is not None and now_s - called_s >= self.every_s:
                called_s = now_s
                self.every()
            if self.stopped:
                return Ending.STOPPED
            if self.until is not None and self.until():
                return Ending.DONE
            if self.for_s is not None and now_s - started_s >= self.for_s:
                return Ending.TIME
            if self.timeout_s is not None and now_s - started_s >= self.timeout_s:
                return Ending.TIMEOUT
            if not noticed and now_s - started_s >= NOTICE_AFTER_S:
                noticed = True
                for source in (stream.source for stream in self.streams):
                    if source.name not in self.connected:
                        keys = ", and do the keys fit" if source.curve is not None else ""
                        started = f"did you start the engine with KV events{keys}?"
                        click.echo(f"nothing answers at {source.events}; {started}", err=True)


def settled(view: CacheView) -> bool:
    """The view is exact, or as exact as it will become without further events."""
    stream = view.stream
    return view.inexact is None or (stream.next_seq is not None and not stream.repairing)
