"""`warmroute events verify`: does the tree built from the stream equal what the replica itself says it holds?"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import click
import msgspec
from rich.table import Table
from rich.text import Text

from events.analysis.compare import Comparison, compare
from events.analysis.tree import Tree
from events.cache.pool import Digest
from events.feed import Feed
from events.messages import Frames
from events.native import SnapshotHeader, decode_snapshot_header
from events.source import Record, Source
from events.stream.actions import Action, Compare
from events.tool.comparison import grid, show_comparison
from events.tool.options import (
    Moment,
    StreamOptions,
    Target,
    for_option,
    json_option,
    open_target,
    stream_options,
    timeout_option,
)
from events.tool.output import Output, count
from events.tool.streams import CannotTell, Following, Watch, played
from events.view import CacheView, Request

FOR_S = 5.0
WRONG_KEPT = 10
EQUAL, DIFFERENT = 0, 1
STREAM, REPLICA = "stream", "replica"


@click.command()
@click.argument("target", metavar="FILE|ENDPOINT")
@stream_options
@for_option
@click.option("--top", default=10, show_default=True, metavar="N", help="How many differing parts to list; 0: all.")
@timeout_option
@json_option
def verify(target: str, stream: StreamOptions, for_s: float | None, top: int, timeout_s: float, as_json: bool) -> None:
    """Compare the tree built from a stream with the replica's own report of its cache.

    Follows the stream for --for SECONDS (5 if not given), then asks the replica anew: a warmroute replica for a
    snapshot, any other for a replay from batch 0, as far as its buffer goes back to there. The two trees are compared
    at the same batch, and every digest that a status brought on the way is compared at its own. Blocks that only the
    stream has are surplus, those that only the replica has are missing. In a recording the digests in it are compared.
    Exit status: 0 if all is equal, 1 if not, 2 if unknown.

    \b
    Examples:
      warmroute events verify tcp://10.0.0.7:5557 --status tcp://10.0.0.7:5559 --snapshot tcp://10.0.0.7:5560
      warmroute events verify tcp://10.0.0.7:5557 --replay tcp://10.0.0.7:5558 --for 60
      warmroute events verify incident.wre
    """
    output = Output(as_json)
    opened = open_target(target, stream)
    equal = True
    for source in opened.sources:
        if opened.recording is not None:
            result = _recorded(opened, source, output)
        else:
            result = asyncio.run(Verification(opened, source, for_s or FOR_S, timeout_s).run())
        show(output, source.name, result, top)
        equal = equal and result.equal
    click.get_current_context().exit(EQUAL if equal else DIFFERENT)


class Wrong(NamedTuple):
    """A digest that was not ours."""

    seq: int
    at_s: float
    ours: Digest
    theirs: Digest


class Witness(CacheView):
    """Compares digests as the router does, and does not repair what differs: the difference is what we look for."""

    compared = 0
    differed = 0
    wrong: tuple[Wrong, ...] = ()  # the first of them
    clock: Callable[[], float] = staticmethod(time.time)

    def perform(self, actions: Iterable[Action]) -> list[Request]:
        return super().perform(self._without_digests(actions))

    def _without_digests(self, actions: Iterable[Action]) -> Iterator[Action]:
        for action in actions:
            if not isinstance(action, Compare):
                yield action
                continue
            self.compared += 1
            ours = self.resolver.digest()
            if ours == action.digest:
                continue
            self.differed += 1
            if self.differed <= WRONG_KEPT:
                self.wrong = (*self.wrong, Wrong(self.stream.last_seq, self.clock(), ours, action.digest))


class Result(NamedTuple):
    seq: int
    blocks: int
    digests: Witness
    comparison: Comparison | None

    @property
    def equal(self) -> bool:
        return not self.digests.differed and (self.comparison is None or self.comparison.equal)


# ---- live


class Looking(Watch):
    """A watch that has `look` called before each message, when everything before it has been carried out."""

    look: Callable[[], None]

    def received(self, kind: str, frames: Frames) -> None:
        self.look()
        super().received(kind, frames)


class Verification:
    """The stream followed for a while, and the replica asked anew: a second subscription, of the same stream."""

    def __init__(self, target: Target, source: Source, for_s: float, timeout_s: float) -> None:
        if not source.native and source.replay is None:
            raise CannotTell(f"{source.name}: nobody to ask; give --snapshot, or --replay for other engines")
        self._for_s = for_s
        self._timeout_s = timeout_s
        self._tree = Tree()
        self._stream = Looking(target, source, name=STREAM, tree=self._tree, view_type=Witness)
        assert isinstance(self._stream.view, Witness)
        self._witness = self._stream.view
        again = msgspec.structs.replace(source, name=f"{source.name} again", status=None)
        self._replica = Looking(target, again, name=REPLICA, tree=self._tree)
        self._stream.look = self._replica.look = self._look
        self._result: Result | None = None

    async def run(self) -> Result:
        name, witness = self._stream.source.name, self._witness
        async with Following(self._look) as following:
            following.add(self._stream)
            if not await following.until(lambda: self._stream.settled, self._timeout_s):
                raise CannotTell(f"{name}: nothing came within {self._timeout_s:g} s (--timeout)")
            await following.until(lambda: False, self._for_s)
            following.add(self._replica)
            if not await following.until(lambda: self._result is not None, self._timeout_s):
                raise CannotTell(self._why_not())
            if self._stream.source.status is not None:
                await following.until(lambda: witness.compared > 0, self._timeout_s)
        assert self._result is not None
        return self._result

    def _look(self) -> None:
        """Compare as soon as both are at the same batch."""
        stream, replica = self._stream.view, self._replica.view
        if self._result is not None or replica.stream.next_seq is None or not self._replica.settled:
            return
        if replica.inexact is not None:
            name = self._stream.source.name
            raise CannotTell(f"{name}: what the replica says of itself is inexact: {replica.inexact}")
        if replica.stream.next_seq == stream.stream.next_seq:
            comparison = compare(self._tree, STREAM, REPLICA)
            self._result = Result(stream.stream.last_seq, stream.resolver.resident_blocks(), self._witness, comparison)

    def _why_not(self) -> str:
        stream, replica = self._stream.view.stream, self._replica.view.stream
        if replica.next_seq is None:
            return f"{self._stream.source.name}: the replica did not answer within {self._timeout_s:g} s (--timeout)"
        return (
            f"{self._stream.source.name}: the stream is at batch {stream.last_seq} and the replica at "
            f"{replica.last_seq}; they did not meet within {self._timeout_s:g} s (--timeout)"
        )


# ---- from a recording


def _recorded(target: Target, source: Source, output: Output) -> Result:
    watch = Watch(target, source, name=STREAM, view_type=Witness)
    witness = watch.view
    assert isinstance(witness, Witness)
    witness.clock = lambda: watch.at_s
    played([watch], output.note)
    if not witness.compared:
        raise CannotTell(f"{source.name}: no digest in {target.name}; record a warmroute replica, with --status")
    comparison = _next_snapshot(target, source, witness.wrong[0].at_s) if witness.wrong else None
    return Result(witness.stream.last_seq, witness.resolver.resident_blocks(), witness, comparison)


def _next_snapshot(target: Target, source: Source, after_s: float) -> Comparison | None:
    """The difference to the first snapshot in the recording that came after this time."""
    assert target.recording is not None
    number = target.recording.sources.index(source)
    records = target.recording.records(target.recording.find(at_time=after_s))
    for header, payloads in snapshots(record for record in records if record.source == number):
        tree = Tree()
        stream = Watch(target, source, name=STREAM, tree=tree, view_type=Witness)
        stream.play(Moment(seq=header.seq))
        replica = Watch(target, source, name=REPLICA, tree=tree)
        feed = Feed(replica.view)
        feed.connected(0.0)
        replica.view.perform(replica.view.stream.snapshot(header.incarnation, header.seq, payloads, 0.0))
        return compare(tree, STREAM, REPLICA) if stream.view.stream.last_seq == header.seq else None
    return None


def snapshots(records: Iterable[Record]) -> Iterator[tuple[SnapshotHeader, list[bytes]]]:
    """The whole snapshots among the records."""
    header: SnapshotHeader | None = None
    payloads: list[bytes] = []
    for record in records:
        if record.kind != "snapshot" or len(record.frames) != 2:
            continue
        try:
            header, payloads = decode_snapshot_header(record.frames[1]), []
        except msgspec.DecodeError:  # msgspec.ValidationError is one
            payloads.append(record.frames[1])
        if header is not None and len(payloads) == header.batches:
            yield header, payloads
            header = None


# ---- what is shown


def show(output: Output, name: str, result: Result, top: int) -> None:
    if output.json:
        digests_wrong = [
            {"seq": one.seq, "stream": one.ours._asdict(), "replica": one.theirs._asdict()}
            for one in result.digests.wrong
        ]
        fields = {
            "seq": result.seq,
            "blocks": result.blocks,
            "digests_compared": result.digests.compared,
            "digests_differed": result.digests.differed,
        }
        output.line(
            {"kind": "verify", "replica": name, "equal": result.equal, **fields, "digests_wrong": digests_wrong}
        )
    else:
        output.console.print(_table(name, result), soft_wrap=False)
    if result.comparison is not None and not result.comparison.equal:
        names = {STREAM: "the tree built from it; blocks only here are surplus", REPLICA: "the replica itself"}
        show_comparison(output, result.comparison, names, None, top)


def _table(name: str, result: Result) -> Table:
    verdict = Text("equal", style="green") if result.equal else Text("DIFFERENT", style="bold red")
    table = grid()
    table.add_row("replica", Text.assemble((name, "bold"), "  ", verdict))
    table.add_row("held", f"{count(result.blocks, 'block')} at batch {result.seq}, by the stream")
    table.add_row("digests", f"{result.digests.compared:,} compared, {result.digests.differed:,} wrong")
    for wrong in result.digests.wrong[:3]:
        table.add_row("", f"batch {wrong.seq}: {_digest(wrong.ours)} by the stream, {_digest(wrong.theirs)} by itself")
    return table


def _digest(digest: Digest) -> str:
    return f"{count(digest.blocks, 'block')} ({digest.xor:016x})"
