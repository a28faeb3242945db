"""`warmroute events conform`: grades a stream against the wire format."""

import time
from collections import Counter
from collections.abc import Sequence

import click
import zmq
from rich.table import Table
from rich.text import Text

from events.analysis.conformance import Conformance, Finding
from events.cache.changes import Change
from events.messages import EventBatch, Frames
from events.sockets.curve import secure_client
from events.source import Source
from events.stream.actions import Action, Replay
from events.subscriber import MAX_MESSAGE_BYTES
from events.tool.options import StreamOptions, Target, for_option, json_option, open_target, stream_options
from events.tool.output import Output, count
from events.tool.streams import CannotTell, Stream, played

FOR_S = 30.0
CONNECT_TIMEOUT_S = 3.0
REPLAY_TIMEOUT_S = 5.0
POLL_MS = 50
STYLES = {"pass": "green", "fail": "bold red", "not seen": "dim"}
PASSED, FAILED = 0, 1


@click.command()
@click.argument("target", metavar="FILE|ENDPOINT")
@stream_options
@for_option
@json_option
def conform(target: str, stream: StreamOptions, for_s: float | None, as_json: bool) -> None:
    """Grade any engine's stream against the wire format, point by point.

    Listen until Ctrl-C or for --for SECONDS (default: 30), query the replay socket at the beginning, at every gap
    and from several starts at the end, and grade each point: pass, fail, or not seen. A failed point shows the first
    example and its effect on a router. For a recording, grade everything in it. Exit status: 0 if
    no point failed, 1 if one did, 2 if there was nothing to grade.

    \b
    Examples:
      warmroute events conform tcp://10.0.0.7:5557 --replay tcp://10.0.0.7:5558
      warmroute events conform tcp://10.0.0.7:5557 --for 300 --json > grades.jsonl
      warmroute events conform incident.wre
    """
    output = Output(as_json)
    opened = open_target(target, stream)
    failed = False
    for source in opened.sources:
        if opened.recording is None:
            graded = _live(source, for_s or FOR_S, output)
        else:
            recorded = Recorded(opened, source)
            played([recorded], output.note)
            graded = recorded.graded
        findings = graded.findings()
        if not graded.messages:  # a replay socket alone, answering or not, says nothing about a stream
            silent = any(finding.point.name == "replay ends" and finding.failed for finding in findings)
            also = ", and the replay socket does not answer" if silent else ""
            raise CannotTell(f"{source.name}: no message came{also}")
        show(output, source.name, graded, findings)
        failed |= any(finding.state == "fail" for finding in findings)
    click.get_current_context().exit(FAILED if failed else PASSED)


# ---- where the facts come from


class Recorded(Stream):
    """A view is fed too: its requests are those that the recorder sent, so we know what was asked."""

    def __init__(self, target: Target, source: Source) -> None:
        super().__init__(target, source)
        if self.recording.header.redacted:
            raise CannotTell(
                f"{target.name} is redacted: it lacks tokens and the engine's hashes, so little can be graded"
            )
        number = self.recording.sources.index(source)
        replays = any(record.source == number and record.kind == "replay" for record in self.recording.records())
        self.graded = Conformance(can_replay=replays)

    def received(self, kind: str, frames: Frames) -> None:
        if kind == "session":
            self.graded.interrupted()
        elif kind == "events":
            self.graded.live(frames)
        elif kind == "replay":
            self.graded.replayed(frames)

    def acted(self, action: Action, batch: EventBatch | None, changes: Sequence[Change]) -> None:  # noqa: ARG002
        if isinstance(action, Replay):
            self.graded.replay_asked(action.start)


def _live(source: Source, for_s: float, output: Output) -> Conformance:
    graded = Conformance(can_replay=source.replay is not None)
    with zmq.Context() as context:
        listener = Listener(context, source, graded)
        try:
            if not listener.connect(CONNECT_TIMEOUT_S):
                output.note(f"nothing answers at {source.events} yet; is the engine started with KV events on?")
            listener.listen(for_s)
        except KeyboardInterrupt:
            output.note("stopped; some last replays are asked for")
        finally:
            listener.finish()
    return graded


class Listener:
    """The sockets of a stream that is graded. Not the subscriber's: what it would make good is looked for here."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", source: Source, graded: Conformance) -> None:
        self._context = context
        self._source = source
        self._graded = graded
        self._events = self._socket(zmq.SUB)
        self._events.subscribe(source.topic.encode())
        self._replay: zmq.Socket[bytes] | None = None
        self._replay_due_s: float | None = None
        self._poller = zmq.Poller()
        self._poller.register(self._events, zmq.POLLIN)

    def connect(self, timeout_s: float) -> bool:
        """A replay asked for before the event socket is connected would leave a gap behind it."""
        monitor = self._events.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._events.connect(self._source.events)
        connected = monitor.poll(int(timeout_s * 1000)) != 0
        self._events.disable_monitor()
        monitor.close()
        return connected

    def listen(self, for_s: float) -> None:
        ends_s = time.monotonic() + for_s
        while (now_s := time.monotonic()) < ends_s:
            start = self._graded.wanted_replay()
            if start is not None:
                self._ask(start)
            self._receive(min(POLL_MS, int((ends_s - now_s) * 1000) + 1))

    def finish(self) -> None:
        """The replays that are left to be graded; then the sockets are closed."""
        try:
            starts = [self._graded.wanted_replay(), *self._graded.last_replays()]
            for start in (start for start in starts if start is not None):
                while self._replay_due_s is not None:
                    self._receive(POLL_MS)
                if self._graded.can_replay:
                    self._ask(start)
            while self._replay_due_s is not None:
                self._receive(POLL_MS)
        finally:
            self._events.close()
            if self._replay is not None:
                self._replay.close()

    def _receive(self, timeout_ms: int) -> None:
        ready = dict(self._poller.poll(timeout_ms))
        if self._events in ready:
            for frames in _waiting(self._events):
                self._graded.live(frames)
        if self._replay is not None and self._replay in ready:
            for frames in _waiting(self._replay):
                ended = self._graded.replayed(frames)
                self._replay_due_s = None if ended else time.monotonic() + REPLAY_TIMEOUT_S
        if self._replay_due_s is not None and time.monotonic() >= self._replay_due_s:
            self._graded.replay_silent()
            self._replay_due_s = None

    def _ask(self, start: int) -> None:
        assert self._source.replay is not None
        if self._replay is None:
            self._replay = self._socket(zmq.DEALER)
            self._replay.connect(self._source.replay)
            self._poller.register(self._replay, zmq.POLLIN)
        self._graded.replay_asked(start)
        self._replay_due_s = time.monotonic() + REPLAY_TIMEOUT_S
        self._replay.send_multipart([b"", start.to_bytes(8, "big")])

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.linger = 0
        socket.rcvhwm = 0
        socket.maxmsgsize = MAX_MESSAGE_BYTES
        if self._source.curve is not None:
            secure_client(socket, self._source.curve)
        return socket


def _waiting(socket: "zmq.Socket[bytes]", limit: int = 1000) -> list[list[bytes]]:
    messages: list[list[bytes]] = []
    try:
        while len(messages) < limit:
            messages.append(socket.recv_multipart(zmq.NOBLOCK))
    except zmq.Again:
        pass
    return messages


# ---- what is shown


def show(output: Output, name: str, graded: Conformance, findings: list[Finding]) -> None:
    states: Counter[str] = Counter(finding.state for finding in findings)
    if output.json:
        for finding in findings:
            output.line(_fields(name, finding))
        output.line({"kind": "summary", "replica": name, **states, "batches": graded.batches, "notes": graded.notes})
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for finding in findings:
        state = Text(finding.state, style=STYLES[finding.state])
        table.add_row(state, finding.point.name, _detail(finding))
    output.console.print(table, soft_wrap=False)
    for note in graded.notes:
        output.show(f"note: {note}")
    seen = f"{count(graded.batches, 'batch')}, {count(graded.events, 'event')}"
    output.show(f"{name}: {states['pass']} passed, {states['fail']} failed, {states['not seen']} not seen; {seen}")


def _detail(finding: Finding) -> Text:
    point = finding.point
    if finding.state != "fail":
        return Text(point.says, style="dim")
    times = f"{finding.failed:,} of {count(finding.checked, 'time')}: "
    return Text.assemble(times, finding.example or "", "\n", (f"A router: {point.consequence}", "yellow"))


def _fields(name: str, finding: Finding) -> dict[str, object]:
    point = finding.point
    return {
        "kind": "point",
        "replica": name,
        "point": point.name,
        "says": point.says,
        "state": finding.state,
        "checked": finding.checked,
        "failed": finding.failed,
        "example": finding.example,
        "consequence": point.consequence if finding.state == "fail" else None,
    }
