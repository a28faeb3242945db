"""`warmroute events conform`: grades a stream against the wire format."""

import asyncio
import logging

import click
from msgspec.structs import replace
from rich.table import Table
from rich.text import Text

from events.analysis.conformance import Conformance, Finding
from events.analysis.grading import FOR_S, Graded, objects
from events.tool.options import StreamOptions, for_option, json_option, open_target, stream_options
from events.tool.output import Output, count
from events.tool.streams import CannotTell

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
        recording = opened.recording
        if recording is None:
            source = replace(source, status=None, snapshot=None)
            graded = Graded(source, can_replay=source.replay is not None)
            asyncio.run(graded.listen(for_s or FOR_S))
        else:
            graded = Graded(source, can_replay=any(one.kind == "replay" for one in recording.records(source)))
            recording.replay_into(graded.view, source, on_record=graded.recorded)
        if isinstance(findings := graded.findings(), str):
            raise CannotTell(findings)
        show(output, source.name, graded.grades, findings)
        failed |= any(finding.state == "fail" for finding in findings)
    for part in opened.recording.damage if opened.recording is not None else ():
        output.note(f"{opened.name}: {part}")
    click.get_current_context().exit(FAILED if failed else PASSED)


def show(output: Output, name: str, graded: Conformance, findings: list[Finding]) -> None:
    *points, summary = objects(name, graded, findings)
    if output.json:
        for fields in (*points, summary):
            output.line(fields)
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
    passed, failed, unseen = (summary[state] for state in ("pass", "fail", "not seen"))
    output.show(f"{name}: {passed} passed, {failed} failed, {unseen} not seen; {seen}")
