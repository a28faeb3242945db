"""`warmroute events replay`: publishes a recorded stream again, with its topics, sequence numbers and bytes."""

import math
import signal
import time

import click
import zmq
from msgspec import Struct, field

from events.messages import EventBatch
from events.publisher import END_OF_REPLAY, is_local
from events.recording import Recording, feed_record
from events.sockets.peers import bind
from events.source import Source
from events.stream.actions import Action, Apply, Reset
from events.tool.options import StreamOptions, checked_endpoint, json_option, open_target
from events.tool.output import Output, count
from events.view import CacheView

SUBSCRIBED = b"\x01"
REPLAY_BATCHES = 10_000
POLL_S = 0.02


def _speed(_: click.Context, __: click.Parameter, value: str) -> float | None:
    if value == "max":
        return None
    try:
        speed = float(value)
    except ValueError:
        speed = math.nan
    if not 0 < speed < math.inf:
        raise click.BadParameter(f"{value!r} is neither a number above 0 nor 'max'")
    return speed


@click.command()
@click.argument("file")
@click.option("--bind", required=True, metavar="ENDPOINT", help="Where to publish the events.")
@click.option("--replay-bind", metavar="ENDPOINT", help="Where to answer replay requests.")
@click.option("--source", "name", metavar="NAME", help="Which source, if the recording has several.")
@click.option(
    "--speed", callback=_speed, default="1", show_default=True, metavar="N|max", help="N times as fast as recorded."
)
@click.option("--wait/--no-wait", default=True, show_default=True, help="Wait for the first subscriber.")
@click.option(
    "--stay",
    type=click.FloatRange(min=0),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to keep answering requests at the end.",
)
@json_option
def replay(
    file: str,
    bind: str,
    replay_bind: str | None,
    name: str | None,
    speed: float | None,
    wait: bool,
    stay: float,
    as_json: bool,
) -> None:
    """Publish a recording again, with the original topics, sequence numbers and bytes.

    Use it to test a consumer against yesterday's incident: gaps are gaps again, and the replay socket has what the
    recorder got.

    \b
    Examples:
      warmroute events replay incident.wre --bind tcp://127.0.0.1:5557 --replay-bind tcp://127.0.0.1:5558
      warmroute events replay incident.wre --bind tcp://127.0.0.1:5557 --speed 10
      warmroute events replay incident.wre --bind tcp://127.0.0.1:5557 --speed max --no-wait --stay 0
    """
    output = Output(as_json)
    opened = open_target(file, StreamOptions())
    recording = opened.recording
    if recording is None:
        raise click.UsageError(f"{file} is an endpoint; replay publishes a recording")
    sources = {source.name: source for source in opened.sources}
    if name is None and len(sources) == 1:
        [name] = sources
    if name is None or name not in sources:
        refused = "" if name is None else f", not {name!r}"
        raise click.UsageError(f"{opened.name} holds {', '.join(sources)}{refused}; choose one with --source")
    source = sources[name]
    for option, endpoint in {"--bind": bind, "--replay-bind": replay_bind}.items():
        if endpoint is not None:
            checked_endpoint(endpoint, option, bind=True)
            if not is_local(endpoint):
                output.note(f"{endpoint} can be read by anyone who reaches it, and the recording holds prompts")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with Player(recording, source, bind, replay_bind, speed=speed) as player:
            for damage in recording.damage:
                output.note(f"{opened.name}: {damage}")
            output.note(f"publishing at {', '.join(player.endpoints)}")
            finished = True
            try:
                if wait:
                    output.note("waiting for a subscriber (--no-wait begins at once)")
                    player.wait_for_subscriber()
                player.play()
                player.stay(stay)
            except KeyboardInterrupt:
                finished = False
    except zmq.ZMQError as error:
        raise click.ClickException(str(error)) from error
    if output.json:
        totals = {"batches": player.batches, "payload_bytes": player.payload_bytes, "replays": player.replays}
        output.line({"finished": finished, **totals})
        return
    end = "the end of the recording" if finished else "stopped"
    output.show(f"{end}: {count(player.batches, 'batch')} published, {count(player.replays, 'replay')} answered")


class Incarnation(Struct):
    """One incarnation of the recorded publisher: its first live batch, and the batches that came by replay."""

    first: int | None = None
    replayed: dict[int, bytes] = field(default_factory=dict)


class Player:
    """Publishes a recording. Use as a context manager; KeyboardInterrupt may end any of its methods.

    The replay socket answers from the batches before the current one that the recording holds: those that came live,
    and those that the recorder itself had to ask for. So a gap in the recording is a gap again, and can be repaired as
    far as it could be then. Where the publisher restarted, the replay buffer starts empty, as it did then.
    """

    def __init__(
        self, recording: Recording, source: Source, events: str, replay: str | None = None, speed: float | None = 1.0
    ) -> None:
        """Bind the endpoints; port 0 takes a free one. `speed`: None is as fast as the subscribers can read."""
        self.batches = self.payload_bytes = self.replays = 0
        self._recording = recording
        self._source = source
        self._speed = speed
        latest = Incarnation()
        self._current, self._next, self._topic = latest, 0, b""
        self._sent_by: list[Incarnation] = []  # the sender of each record
        self._short = False  # vLLM before 0.26 replies without a topic frame

        def acted(action: Action, _: EventBatch | None) -> None:
            nonlocal latest
            if isinstance(action, Apply) and record.kind == "replay":
                latest.replayed[action.seq] = action.payload
            elif isinstance(action, Reset) and action.reason != "snapshot":
                latest = Incarnation()

        view = CacheView(source.name, source.stream(), source.resolver(), on_action=acted)
        for record in recording.records(source):
            feed_record(view, record)
            if latest.first is None:
                latest.first = record.seq
            self._sent_by.append(latest)
            self._short = self._short or (record.kind == "replay" and len(record.frames) == 3)
        self._published: dict[int, bytes] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self.endpoints: list[str] = []
        try:
            self._events = self._bind(zmq.XPUB, events)  # it sees who subscribes
            self._events.setsockopt(zmq.XPUB_NODROP, speed is None)
            self._replay = self._bind(zmq.ROUTER, replay) if replay else None
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise

    def __enter__(self) -> "Player":
        return self

    def __exit__(self, *_: object) -> None:
        for socket in self._sockets:
            socket.close()
        self._context.term()

    def wait_for_subscriber(self) -> None:
        while True:
            while self._events.poll(0):
                if self._events.recv().startswith(SUBSCRIBED):
                    return
            self._serve(POLL_S)

    def play(self) -> None:
        began: tuple[float, float] | None = None  # the recorder's clock, and ours
        for record, incarnation in zip(self._recording.records(self._source), self._sent_by, strict=True):
            if self._speed is not None:
                began = began or (record.time, time.monotonic())
                self.stay(began[1] + (record.time - began[0]) / self._speed - time.monotonic())
            if incarnation is not self._current:
                self._current, self._next, self._published = incarnation, 0, {}
            if record.kind != "events":
                continue
            if record.seq is not None:  # whoever has the batch may ask for it at once
                self._topic, self._next = record.frames[0], record.seq + 1
                self._published.setdefault(record.seq, record.frames[2])
                if len(self._published) > REPLAY_BATCHES:
                    del self._published[next(iter(self._published))]
            while True:
                try:
                    self._events.send_multipart(record.frames, zmq.NOBLOCK)
                    break
                except zmq.Again:  # at full speed, until the slowest subscriber has read
                    self._serve(POLL_S)
            self._serve(0)
            self.batches += 1
            self.payload_bytes += len(record.frames[-1])

    def stay(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            self._serve(min(left_s, POLL_S))

    def _bind(self, kind: int, endpoint: str) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        self._sockets.append(socket)
        socket.sndhwm = 0 if kind == zmq.ROUTER else 100_000
        socket.linger = 2000
        self.endpoints.append(bind(socket, endpoint))
        return socket

    def _serve(self, wait_s: float) -> None:
        """Answer a request, if one comes."""
        if self._replay is None:
            time.sleep(wait_s)
            return
        if not self._replay.poll(round(wait_s * 1000)):
            return
        identity, *request = self._replay.recv_multipart()
        if len(request) != 2 or request[0] != b"" or len(request[1]) > 8:
            return
        self.replays += 1
        first = self._current.first
        # Batches that never came live had been published by then.
        before = 2**64 if first is None else max(first, self._next)
        known = {seq: p for seq, p in self._current.replayed.items() if seq < before} | self._published
        topic = [] if self._short else [self._topic]
        for seq in sorted(known)[-REPLAY_BATCHES:]:
            if seq >= int.from_bytes(request[1], "big"):
                self._replay.send_multipart([identity, b"", *topic, seq.to_bytes(8, "big"), known[seq]])
        self._replay.send_multipart([identity, b"", *(END_OF_REPLAY[1:] if self._short else END_OF_REPLAY)])
