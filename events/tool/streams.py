"""The streams that a tool reads: recordings are played, then live streams followed until a condition, a time or Ctrl-C.

A tool is a fold over them: a kind of `Stream` that hears of each message and of each action of its view.
"""

import asyncio
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import click

from events.analysis.tree import Tree
from events.cache.changes import Change
from events.messages import EventBatch, Frames
from events.recording import Moment, Recording
from events.source import Record, Source
from events.stream.actions import Action
from events.subscriber import Subscriber
from events.tool.options import Target
from events.view import CacheView

NOTICE_AFTER_S = 3.0
LOOK_EVERY_S = 0.02


class CannotTell(click.ClickException):
    """There is no answer: neither "equal" nor "different"."""

    exit_code = 2


class Stream:
    """One stream of a target, live or recorded, and the view that it feeds."""

    def __init__(
        self, target: Target, source: Source, *, name: str | None = None, view_type: type[CacheView] = CacheView
    ) -> None:
        self.target = target
        self.source = source
        self.at_s = 0.0  # the wall clock at the last message
        self.is_reached = False  # its event socket has been connected
        changes: list[Change] = []

        def acted(action: Action, batch: EventBatch | None) -> None:
            made = changes.copy()
            changes.clear()
            self.acted(action, batch, made)

        self.view = view_type(
            name or source.name, source.stream(), source.resolver(), on_change=changes.append, on_action=acted
        )

    def received(self, kind: str, frames: Frames) -> None:
        """For the tool: a message, or a mark without frames, before it is acted on."""

    def acted(self, action: Action, batch: EventBatch | None, changes: Sequence[Change]) -> None:
        """For the tool: the view has acted on a message, and these keys changed."""

    @property
    def settled(self) -> bool:
        """The view is exact, or as exact as it will become without further events."""
        stream = self.view.stream
        return self.view.inexact is None or (stream.next_seq is not None and not stream.repairing)

    def play(self, recording: Recording, moment: Moment | None) -> None:
        """Take the state of the recording at a moment."""

        def on_record(record: Record) -> None:
            self.at_s = record.time
            self.received(record.kind, record.frames)

        recording.replay_into(self.view, self.source, moment, on_record)

    def tap(self, kind: str, frames: Frames) -> None:
        self.at_s = time.time()
        self.is_reached = self.is_reached or kind == "connected"
        self.received(kind, frames)


class Watch(Stream):
    """Feeds a tree. `tree` may be shared with others; `name` is the replica's name in it."""

    def __init__(self, target: Target, source: Source, *, tree: Tree | None = None, **options: Any) -> None:
        super().__init__(target, source, **options)
        self.tree = Tree() if tree is None else tree

    def acted(self, action: Action, batch: EventBatch | None, changes: Sequence[Change]) -> None:  # noqa: ARG002
        self.tree.apply(self.view.name, changes, batch.ts if batch is not None else self.at_s)


Read = TypeVar("Read", bound=Stream)


def played(streams: Iterable[Read], note: Callable[[str], None], at: Moment | None = None) -> list[Read]:
    """Play those of recordings, to a moment or to their end; return the live ones."""
    live, damage = [], {}
    for stream in streams:
        if (recording := stream.target.recording) is not None:
            stream.play(recording, at)
            damage[stream.target.name] = recording.damage
        elif at is not None:
            raise click.UsageError(f"{stream.target.name} is live; only a recording has moments to choose")
        else:
            live.append(stream)
    for name, parts in damage.items():
        for part in parts:
            note(f"{name}: {part}")
    return live


def follow(
    streams: Iterable[Stream],
    *,
    until: Callable[[], bool] = lambda: False,
    limit_s: float | None = None,
    every: Callable[[], None] = lambda: None,
    every_s: float = 0.25,
) -> bool:
    """Run until `until()` is true; False: `limit_s` is over, or Ctrl-C or SIGTERM came first.

    `every` is called now and then, to draw or flush. An exception of any of the callbacks ends it too.
    """

    async def run() -> bool:
        async with Following(every, every_s) as followed:
            for stream in streams:
                followed.follow(stream)
            return await followed.until(until, limit_s)

    return asyncio.run(run())


class Following(Subscriber):
    """Live streams that are followed; more may be added."""

    def __init__(self, every: Callable[[], None] = lambda: None, every_s: float = 0.25) -> None:
        super().__init__()
        self._every = every
        self._every_s = every_s
        self._unheard: list[Stream] = []
        self._stopped = False
        self._failure: BaseException | None = None
        self._started_s = self._called_s = time.monotonic()
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._failed)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, partial(setattr, self, "_stopped", True))

    def follow(self, stream: Stream) -> None:
        self._unheard.append(stream)
        self.add(stream.source, stream.view, tap=stream.tap)

    async def until(self, condition: Callable[[], bool], limit_s: float | None = None) -> bool:
        """Wait until it is true; False: the time is over, or Ctrl-C came first."""
        began_s = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if self._failure is not None:
                raise self._failure
            now_s = time.monotonic()
            if now_s - self._called_s >= self._every_s:
                self._called_s = now_s
                self._every()
            if self._stopped:
                return False
            if condition():
                return True
            if limit_s is not None and now_s - began_s >= limit_s:
                return False
            if now_s - self._started_s >= NOTICE_AFTER_S:
                for source in (stream.source for stream in self._unheard if not stream.is_reached):
                    keys = ", and do the keys fit" if source.curve is not None else ""
                    started = f"did you start the engine with KV events{keys}?"
                    click.echo(f"nothing answers at {source.events}; {started}", err=True)
                self._unheard.clear()

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback of the loop raised: without this, asyncio would only log it."""
        error = context.get("exception")
        if isinstance(error, BaseException):
            self._failure = self._failure or error
        else:
            loop.default_exception_handler(context)
