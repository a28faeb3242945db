"""A stream's view together with the tree and the statistics that it feeds."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import click

from events.analysis.statistics import Statistics
from events.analysis.tree import Tree
from events.analysis.trunks import load_tokenizer
from events.cache.changes import Change
from events.feed import Feed
from events.messages import EventBatch, Frames
from events.source import Record, Source
from events.stream.actions import Action
from events.tool.live import Ending, Followed, follow, settled
from events.tool.options import Target
from events.tool.words import Decode
from events.view import CacheView


class Watch:
    """One stream. `tree` may be shared with others; `name` is the replica's name in it."""

    def __init__(
        self,
        source: Source,
        *,
        name: str | None = None,
        tree: Tree | None = None,
        view_type: type[CacheView] = CacheView,
    ) -> None:
        self.source = source
        self.tree = tree if tree is not None else Tree()
        self.statistics = Statistics()
        self.at_s = 0.0  # the wall clock at the last message
        self._changes: list[Change] = []
        on_change, on_action = self._changes.append, self._acted
        self.view = view_type(
            name or source.name, source.stream(), source.resolver(), on_change=on_change, on_action=on_action
        )

    def followed(self) -> Followed:
        return Followed(self.source, self.view, tap=self.tap)

    def replay(self, target: Target, moment: "Moment | None" = None) -> None:
        """Take the state of the target's recording at its end, or at a moment."""
        assert target.recording is not None
        recording, at = target.recording, moment or Moment()
        until_time = at.time_s
        if at.after_s is not None:
            until_time = at.after_s + next((record.time for record in recording.records()), 0.0)
        recording.replay_into(
            Feed(self.view), self.source, until_time=until_time, until_seq=at.seq, on_record=self._on_record
        )

    def _on_record(self, record: Record) -> None:
        self._received(record.kind, record.frames, record.time)

    def tap(self, socket: str, frames: Frames) -> None:
        self._received(socket, frames, time.time())

    def _received(self, socket: str, frames: Frames, at_s: float) -> None:
        self.at_s = at_s
        self.statistics.received(socket, frames, at_s)

    def _acted(self, action: Action, batch: EventBatch | None) -> None:
        changes = self._changes.copy()
        self._changes.clear()
        self.statistics.acted(action, batch, changes, self.at_s)
        self.tree.apply(self.view.name, changes, batch.ts if batch is not None else self.at_s)


class Moment(NamedTuple):
    """A point of a recording: a time of day, seconds after its first message, or a sequence number; none: its end."""

    time_s: float | None = None
    after_s: float | None = None
    seq: int | None = None


class MomentType(click.ParamType[Moment]):
    name = "MOMENT"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Moment:
        if isinstance(value, Moment):
            return value
        text = str(value)
        try:
            if text.isdecimal():
                return Moment(seq=int(text))
            if text.startswith("+"):
                return Moment(after_s=float(text))
            from datetime import datetime

            return Moment(time_s=datetime.fromisoformat(text).timestamp())
        except ValueError:
            self.fail(
                f"{text!r} is not a moment; write 1234 (a batch), +12.5 (seconds) or 2026-11-21T09:30:00", param, ctx
            )


tokenizer_option = click.option(
    "--tokenizer", metavar="DIR", help="Show text instead of token ids, by this folder's tokenizer.json."
)


def load_decoder(folder: str | None) -> Decode | None:
    try:
        return None if folder is None else load_tokenizer(folder)
    except ValueError as error:
        raise click.UsageError(f"--tokenizer: {error}") from error


def note_damage(target: Target, note: Callable[[str], None]) -> None:
    for damage in target.recording.damage if target.recording is not None else ():
        note(f"{target.name}: {damage}")


def watches(target: Target, tree: Tree | None = None) -> list[Watch]:
    """One for every stream of the target, each with a tree of its own if none is given."""
    return [Watch(source, tree=tree) for source in target.sources]


class CannotTell(click.ClickException):
    """There is no answer: neither "equal" nor "different"."""

    exit_code = 2


def load(
    loading: Sequence[tuple[Target, list[Watch], Moment | None]], timeout_s: float, note: Callable[[str], None]
) -> None:
    """Bring every watch to its target's state: of a recording at the moment, of a live stream once it has settled."""
    live: list[Watch] = []
    for target, its_watches, moment in loading:
        if target.recording is None:
            if moment is not None:
                raise click.UsageError(f"{target.name} is live; only a recording has moments to choose")
            live += its_watches
            continue
        for watch in its_watches:
            watch.replay(target, moment)
        note_damage(target, note)
    if not live:
        return
    followed = [watch.followed() for watch in live]
    ending = follow(followed, until=lambda: all(settled(watch.view) for watch in live), timeout_s=timeout_s)
    if ending in (Ending.TIMEOUT, Ending.STOPPED):
        for watch in live:
            if watch.view.stream.next_seq is None:
                raise CannotTell(f"{watch.source.events}: nothing came within {timeout_s:g} s (--timeout)")
