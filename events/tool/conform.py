"""`warmroute events conform`: grades a stream against the wire format."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence

import click
import msgspec
from rich.table import Table
from rich.text import Text

from events.analysis.conformance import Conformance, Finding
from events.cache.changes import Change
from events.messages import EventBatch, Frames
from events.source import Source
from events.stream.actions import Action, Apply, Replay, Reset
from events.stream.foreign_stream import ForeignStream
from events.stream.states import StreamConfig
from events.tool.options import StreamOptions, Target, for_option, json_option, open_target, stream_options
from events.tool.output import Output, count
from events.tool.streams import CannotTell, Following, Stream, played

FOR_S = 30.0
MAX_SEQ = 2**40  # beyond, it is no number of a batch
REPLAY_TIMEOUT_S = 5.0
STYLES = {"pass": "green", "fail": "bold red", "not seen": "dim"}
PASSED, FAILED = 0, 1


@click.command()
@click.argument("target", metavar="FILE|ENDPOINT")
@stream_options
@for_option
@json_option
def conform(target: str, stream: StreamOptions, for_s: float | None, as_json: bool) -> None:
    """Grade any engine's stream against the wire format, point by point.

    Listen until Ctrl-C or for --for SECONDS (default: 30), query the replay socket at the beginning, at every gap,
    while the engine is idle and at the end, and grade each point: pass, fail, or not seen. A failed point shows the
    first example and its effect on a router. For a recording, grade everything in it. Exit status: 0 if no point
    failed, 1 if one did, 2 if there was nothing to grade.

    \b
    Examples:
      warmroute events conform tcp://10.0.0.7:5557 --replay tcp://10.0.0.7:5558
      warmroute events conform tcp://10.0.0.7:5557 --for 300 --json > grades.jsonl
      warmroute events conform incident.wre
    """
    logging.getLogger("events").addHandler(logging.NullHandler())  # the report grades what is wrong with the stream
    output = Output(as_json)
    opened = open_target(target, stream)
    failed = False
    for source in opened.sources:
        graded = Graded(opened, source)
        if opened.recording is None:
            asyncio.run(_listen(graded, for_s or FOR_S))
        else:
            played([graded], output.note)
        findings = graded.grades.findings()
        if not graded.grades.messages:  # a replay socket alone, answering or not, says nothing about a stream
            silent = any(finding.point.name == "replay ends" and finding.failed for finding in findings)
            also = ", and the replay socket does not answer" if silent else ""
            raise CannotTell(f"{source.name}: no message came{also}")
        show(output, source.name, graded.grades, findings)
        failed |= any(finding.state == "fail" for finding in findings)
    click.get_current_context().exit(FAILED if failed else PASSED)


class Graded(Stream):
    """A stream whose messages are graded. Its view asks for replays, as any other engine's."""

    def __init__(self, target: Target, source: Source) -> None:
        if target.recording is None:
            source = msgspec.structs.replace(source, status=None, snapshot=None)
            replays = source.replay is not None
        else:
            if target.recording.header.redacted:
                lacks = "it lacks tokens and the engine's hashes, so little can be graded"
                raise CannotTell(f"{target.name} is redacted: {lacks}")
            replays = any(record.kind == "replay" for record in target.recording.records(source))
        super().__init__(target, source)
        if target.recording is None:
            once = StreamConfig(can_replay=replays, repair_timeout_s=REPLAY_TIMEOUT_S, repair_attempts=1)
            self.view.stream = ForeignStream(once)
        self.grades = Conformance(can_replay=replays)
        self._replied_s = 0.0

    def received(self, kind: str, frames: Frames) -> None:
        if kind == "events":
            self.grades.live(frames)
        elif kind == "replay":
            self._replied_s = time.monotonic()
            self.grades.replayed(frames)

    def acted(self, action: Action, batch: EventBatch | None, changes: Sequence[Change]) -> None:  # noqa: ARG002
        if isinstance(action, Reset):
            self.grades.forget()
        elif isinstance(action, Apply) and 0 <= action.seq < MAX_SEQ:
            self.grades.applied(action.seq, action.payload)
        elif isinstance(action, Replay):
            if not self.grades.replaying:
                self._replied_s = time.monotonic()
            self.grades.replay_asked(action.start)

    def give_up(self) -> None:
        """Wait no longer for a replay that has not answered for long."""
        if self.grades.replaying and time.monotonic() - self._replied_s >= REPLAY_TIMEOUT_S:
            self.grades.replay_silent()


async def _listen(graded: Graded, for_s: float) -> None:
    async with Following(graded.give_up, every_s=0.02) as followed:
        followed.follow(graded)
        if not await followed.until(lambda: False, for_s) and graded.grades.can_replay and graded.is_reached:
            followed.probe(graded.source.name)
            stream = graded.view.stream
            await followed.until(lambda: not (stream.repairing or graded.grades.replaying), 2 * REPLAY_TIMEOUT_S)


def show(output: Output, name: str, graded: Conformance, findings: list[Finding]) -> None:
    states: Counter[str] = Counter(finding.state for finding in findings)
    if output.json:
        for finding in findings:
            fields = {
                "kind": "point",
                "replica": name,
                "point": finding.point.name,
                "says": finding.point.says,
                "state": finding.state,
                "checked": finding.checked,
                "failed": finding.failed,
                "example": finding.example,
                "consequence": finding.point.consequence if finding.state == "fail" else None,
            }
            output.line(fields)
        output.line({"kind": "summary", "replica": name, **states, "batches": graded.batches, "notes": graded.notes})
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for finding in findings:
        detail = Text(finding.point.says, style="dim")
        if finding.state == "fail":
            times = f"{finding.failed:,} of {count(finding.checked, 'time')}: {finding.example or ''}\n"
            detail = Text.assemble(times, (f"A router: {finding.point.consequence}", "yellow"))
        table.add_row(Text(finding.state, style=STYLES[finding.state]), finding.point.name, detail)
    output.console.print(table, soft_wrap=False)
    for note in graded.notes:
        output.show(f"note: {note}")
    seen = f"{count(graded.batches, 'batch')}, {count(graded.events, 'event')}"
    output.show(f"{name}: {states['pass']} passed, {states['fail']} failed, {states['not seen']} not seen; {seen}")
