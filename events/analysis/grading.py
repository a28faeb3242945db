"""Grades a stream as its messages come, from sockets or a recording. It needs no more than a subscriber does."""

import argparse
import asyncio
import json
import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from events.analysis.conformance import Conformance, Finding
from events.messages import EventBatch, Frames
from events.source import Record, Source
from events.stream.actions import Action, Apply, Replay, Reset
from events.stream.foreign_stream import ForeignStream
from events.stream.states import StreamConfig
from events.subscriber import Subscriber
from events.view import CacheView

FOR_S = 30.0
LOOK_EVERY_S = 0.02
MAX_SEQ = 2**40  # beyond, it is no number of a batch
REPLAY_TIMEOUT_S = 5.0


class Graded:
    """A stream whose messages are graded. Its view asks for replays, as any other engine's."""

    def __init__(self, source: Source, *, can_replay: bool) -> None:
        self.source = source
        self.grades = Conformance(can_replay=can_replay)
        self.is_reached = False  # its event socket has been connected
        once = StreamConfig(can_replay=can_replay, repair_timeout_s=REPLAY_TIMEOUT_S, repair_attempts=1)
        self.view = CacheView(source.name, ForeignStream(once), source.resolver(), on_action=self._acted)
        self._replied_s = 0.0

    def received(self, kind: str, frames: Frames) -> None:
        """Take a message before the view does."""
        self.is_reached = self.is_reached or kind == "connected"
        if kind == "events":
            self.grades.live(frames)
        elif kind == "replay":
            self._replied_s = time.monotonic()
            self.grades.replayed(frames)

    def recorded(self, record: Record) -> None:
        self.received(record.kind, record.frames)

    def _acted(self, action: Action, _batch: EventBatch | None) -> None:
        if isinstance(action, Reset):
            self.grades.forget()
        elif isinstance(action, Apply) and 0 <= action.seq < MAX_SEQ:
            self.grades.applied(action.seq, action.payload)
        elif isinstance(action, Replay):
            if not self.grades.replaying:
                self._replied_s = time.monotonic()
            self.grades.replay_asked(action.start)

    async def listen(self, for_s: float) -> None:
        """Follow the engine until the time is over, SIGINT or SIGTERM; then ask for the end of its stream."""
        stopped = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        async with Subscriber() as subscriber:
            subscriber.add(self.source, self.view, tap=self.received)
            await self._until(stopped.is_set, for_s)
            if not stopped.is_set() and self.grades.can_replay and self.is_reached:
                subscriber.probe(self.source.name)
                stream = self.view.stream
                await self._until(
                    lambda: stopped.is_set() or not (stream.repairing or self.grades.replaying), 2 * REPLAY_TIMEOUT_S
                )

    async def _until(self, condition: Callable[[], bool], limit_s: float) -> None:
        end_s = time.monotonic() + limit_s
        while time.monotonic() < end_s and not condition():
            await asyncio.sleep(LOOK_EVERY_S)
            if self.grades.replaying and time.monotonic() - self._replied_s >= REPLAY_TIMEOUT_S:
                self.grades.replay_silent()  # it has not answered for long, and is not waited for

    def findings(self) -> list[Finding] | str:
        """The grade of each point; or why there is nothing to grade."""
        findings = self.grades.findings()
        if self.grades.messages:
            return findings
        # A replay socket alone, answering or not, says nothing about a stream.
        silent = any(finding.point.name == "replay ends" and finding.failed for finding in findings)
        also = ", and the replay socket does not answer" if silent else ""
        start = (
            ""
            if self.is_reached
            else f"; nothing answers at {self.source.events}: is the engine started with KV events?"
        )
        return f"{self.source.name}: no message came{also}{start}"


def objects(name: str, graded: Conformance, findings: list[Finding]) -> Iterator[dict[str, Any]]:
    """An object for each point, and one that sums up."""
    for finding in findings:
        yield {
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
    states = {state: sum(one.state == state for one in findings) for state in ("pass", "fail", "not seen")}
    yield {"kind": "summary", "replica": name, **states, "batches": graded.batches, "notes": graded.notes}


def main() -> None:
    """Run `kv-events-conform`, the command of the package that holds nothing else."""
    parser = argparse.ArgumentParser(
        prog="kv-events-conform",
        description="Grade an engine's stream of KV cache events, point by point.",
        epilog="Exit status: 0 no point failed, 1 one did, 2 there was nothing to grade.",
    )
    parser.add_argument("endpoint", metavar="ENDPOINT", help="its event socket, tcp://HOST:PORT or ipc://PATH")
    parser.add_argument("--replay", metavar="ENDPOINT", help="its replay socket")
    parser.add_argument("--topic", default="", help="only messages whose topic starts with this")
    parser.add_argument("--for", dest="for_s", type=float, default=FOR_S, metavar="SECONDS", help="default: 30")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    given = parser.parse_args()
    name = given.endpoint.removeprefix("tcp://")
    source = Source(name, given.endpoint, given.replay, topic=given.topic)
    try:
        source.check()
    except ValueError as error:
        parser.error(str(error))
    logging.getLogger("events").addHandler(logging.NullHandler())
    graded = Graded(source, can_replay=given.replay is not None)
    asyncio.run(graded.listen(given.for_s))
    if isinstance(findings := graded.findings(), str):
        parser.exit(2, f"{findings}\n")
    *points, summary = objects(name, graded.grades, findings)
    for one in points:
        failure = f"{one['example']}\n{'':34}a router: {one['consequence']}"
        text = f"{one['state']:8}  {one['point']:24}{failure if one['failed'] else one['says']}"
        print(json.dumps(one) if given.json else text)
    print(json.dumps(summary) if given.json else f"{summary['fail']} of {len(points)} points failed; {name}")
    sys.exit(1 if summary["fail"] else 0)
