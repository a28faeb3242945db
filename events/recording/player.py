"""Publishes a recorded stream again, with its original topics, sequence numbers and bytes.

The replay socket answers from what the recording holds of the batches before the current one: those that came live, and
those that the recorder itself had to ask for. So a gap in the recording is a gap again, and can be repaired as far as
it could be then. Where the publisher restarted, the replay buffer starts empty, as it did then.
"""

import secrets
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable

import zmq
from msgspec import Struct, field

from events.feed import Feed
from events.messages import AllBlocksCleared, BadBatch, BlockRemoved, BlockStored, decode_batch
from events.mirror import Mirror
from events.native import SNAPSHOT_REQUEST, SnapshotHeader, encode_native
from events.publisher import END_OF_REPLAY
from events.recording.recording import Recording, feed_record
from events.source import Record, Source
from events.stream.actions import Action, Apply, Replay, Reset, Snapshot
from events.view import CacheView, Request

SUBSCRIBED = b"\x01"
REPLAY_BATCHES = 10_000
POLL_S = 0.02


class PlayerConfig(Struct, frozen=True):
    """Endpoints to bind; port 0 takes a free one. A `speed` of None is as fast as the subscribers can read."""

    events: str
    replay: str | None = None
    status: str | None = None
    snapshot: str | None = None
    speed: float | None = 1.0


class PlayerStats(Struct):
    batches: int = 0
    payload_bytes: int = 0
    replays: int = 0
    snapshots: int = 0


class Incarnation(Struct):
    """One incarnation of the recorded publisher: its first live batch, and the batches that came by replay."""

    first: int | None = None
    asked: dict[int, bytes] = field(default_factory=dict)


class RecordedStream(CacheView):
    """The recorded stream put in order, as the recorder did it: the incarnations of its publisher, and no resolver."""

    def __init__(self, source: Source, *, mirrored: bool = False) -> None:
        super().__init__(source.name, source.stream())
        self.incarnations = [Incarnation()]
        self.batches = 0
        self.short_replies = False  # vLLM before 0.26 replies without a topic frame
        self.mirror = Mirror() if mirrored else None
        self._feed = Feed(self)
        self._kind = ""

    def take(self, record: Record) -> None:
        self._kind = record.kind
        feed_record(self._feed, record)
        if record.seq is not None:
            self.batches += 1
            if self.incarnations[-1].first is None:
                self.incarnations[-1].first = record.seq
        elif record.kind == "replay" and len(record.frames) == 3:
            self.short_replies = True

    def perform(self, actions: Iterable[Action]) -> list[Request]:
        requests: list[Request] = []
        for action in actions:
            if isinstance(action, Apply):
                if self._kind == "replay":
                    self.incarnations[-1].asked[action.seq] = action.payload
                if self.mirror is not None:
                    try:
                        events = decode_batch(action.payload).events
                    except BadBatch:
                        continue
                    self.mirror.apply(e for e in events if isinstance(e, BlockStored | BlockRemoved | AllBlocksCleared))
            elif isinstance(action, Reset):
                if action.reason != "snapshot":
                    self.incarnations.append(Incarnation())
                if self.mirror is not None:
                    self.mirror = Mirror()
            elif isinstance(action, Replay | Snapshot):
                requests.append(action)
        return requests


class Player:
    """Use as a context manager, or call `close`. KeyboardInterrupt may end any of its methods."""

    def __init__(self, recording: Recording, source: Source, config: PlayerConfig) -> None:
        self.config = config
        self.stats = PlayerStats()
        self._recording = recording
        self._source = source
        self._number = recording.sources.index(source)
        self._plan = RecordedStream(source)
        for record in recording.records():
            if record.source == self._number or record.kind == "session":
                self._plan.take(record)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._answers: dict[zmq.Socket[bytes], Callable[[bytes, bytes], None]] = {}
        self._sockets: list[zmq.Socket[bytes]] = []
        try:
            self._open()
        except zmq.ZMQError:
            self.close()
            raise
        self._begin()

    @property
    def batches(self) -> int:
        """The number of live batches in the recording."""
        return self._plan.batches

    @property
    def position(self) -> int:
        """The number of batches passed."""
        return self._played.batches

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()
        self._context.term()

    def __enter__(self) -> "Player":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_for_subscriber(self) -> None:
        while True:
            while self._events.poll(0):
                if self._events.recv().startswith(SUBSCRIBED):
                    return
            self._serve(POLL_S)

    def play(self, start: int = 0, progress: Callable[[], None] | None = None) -> None:
        """Publish everything from this offset on; earlier batches are for the replay socket only."""
        self._begin()
        clock: tuple[float, float] | None = None
        for offset, record in self._recording.located():
            if record.source != self._number and record.kind != "session":
                continue
            live = offset >= start
            if live and self.config.speed is not None:
                clock = clock or (record.time, time.monotonic())
                self._serve_until(clock[1] + (record.time - clock[0]) / self.config.speed)
            # Publish one record if the publisher had sent it to all subscribers.
            incarnations = len(self._played.incarnations)
            self._played.take(record)
            if len(self._played.incarnations) != incarnations:
                self._begin_incarnation()
            if record.kind == "events":
                # First: whoever has the batch may ask for it at once.
                if record.seq is not None:
                    self._remember(record.frames[0], record.seq, record.frames[2])
                if live:
                    self._send(self._events, record.frames)
                    self.stats.batches += 1
                    self.stats.payload_bytes += len(record.frames[-1])
            elif record.kind == "status" and live and self._status is not None:
                self._send(self._status, record.frames)
            if live and progress is not None:
                progress()

    def stay(self, seconds: float) -> None:
        """Keep answering requests."""
        self._serve_until(time.monotonic() + seconds)

    # ---- the stream

    def _begin(self) -> None:
        self._played = RecordedStream(self._source, mirrored=self.config.snapshot is not None)
        self._topic = b""
        self._begin_incarnation()

    def _begin_incarnation(self) -> None:
        self._incarnation = secrets.randbits(63)
        self._current = self._plan.incarnations[len(self._played.incarnations) - 1]
        self._asked = sorted(self._current.asked)
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=REPLAY_BATCHES)
        self._remember_asked(self._current.first if self._current.first is not None else 2**64)

    def _remember_asked(self, before: int) -> None:
        """Add the batches below `before` that never came live: they were published by then."""
        end = bisect_left(self._asked, before)
        self._buffer += [(seq, self._current.asked[seq]) for seq in self._asked[:end]]
        del self._asked[:end]

    def _remember(self, topic: bytes, seq: int, payload: bytes) -> None:
        self._topic = topic
        self._remember_asked(seq)
        if self._asked[:1] == [seq]:
            del self._asked[0]
        if not self._buffer or self._buffer[-1][0] < seq:
            self._buffer.append((seq, payload))

    # ---- sockets

    def _open(self) -> None:
        config = self.config
        self._events = self._bind(zmq.XPUB, config.events)  # it sees who subscribes
        self._events.setsockopt(zmq.XPUB_NODROP, config.speed is None)
        self._replay = self._bind(zmq.ROUTER, config.replay) if config.replay else None
        self._status = self._bind(zmq.PUB, config.status) if config.status else None
        self._snapshot = self._bind(zmq.ROUTER, config.snapshot) if config.snapshot else None
        self.endpoints = [socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in self._sockets]
        if self._replay is not None:
            self._answers[self._replay] = self._answer_replay
        if self._snapshot is not None:
            self._answers[self._snapshot] = self._answer_snapshot
        for socket in self._answers:
            self._poller.register(socket, zmq.POLLIN)

    def _bind(self, kind: int, endpoint: str) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        self._sockets.append(socket)
        socket.sndhwm = 0 if kind == zmq.ROUTER else 100_000
        socket.linger = 2000
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise zmq.ZMQError(error.errno, f"cannot bind {endpoint}: {zmq.strerror(error.errno or 0)}") from error
        return socket

    def _send(self, socket: "zmq.Socket[bytes]", frames: list[bytes]) -> None:
        while True:
            try:
                socket.send_multipart(frames, zmq.NOBLOCK)
            except zmq.Again:  # it goes at full speed, until the slowest subscriber has read
                self._serve(POLL_S)
            else:
                self._serve(0)
                return

    def _serve_until(self, end_s: float) -> None:
        while (left_s := end_s - time.monotonic()) > 0:
            self._serve(min(left_s, POLL_S))

    def _serve(self, wait_s: float) -> None:
        if not self._answers:
            time.sleep(wait_s)
            return
        for socket, _ in self._poller.poll(round(wait_s * 1000)):
            frames = socket.recv_multipart()
            if len(frames) == 3 and frames[1] == b"":
                self._answers[socket](frames[0], frames[2])

    def _answer_replay(self, identity: bytes, request: bytes) -> None:
        if len(request) > 8:
            return
        assert self._replay is not None
        self.stats.replays += 1
        start, short = int.from_bytes(request, "big"), self._plan.short_replies
        for seq, payload in self._buffer:
            if seq >= start:
                named = [seq.to_bytes(8, "big"), payload] if short else [self._topic, seq.to_bytes(8, "big"), payload]
                self._replay.send_multipart([identity, b"", *named])
        self._replay.send_multipart([identity, b"", *(END_OF_REPLAY[1:] if short else END_OF_REPLAY)])

    def _answer_snapshot(self, identity: bytes, request: bytes) -> None:
        if request != SNAPSHOT_REQUEST or self._played.mirror is None:
            return
        assert self._snapshot is not None
        self.stats.snapshots += 1
        stream, now = self._played.stream, time.time()
        batches = self._played.mirror.snapshot(now)
        incarnation = stream.incarnation if stream.incarnation is not None else self._incarnation
        header = SnapshotHeader(incarnation, stream.last_seq, now, len(batches))
        for payload in (encode_native(header), *batches):
            self._snapshot.send_multipart([identity, b"", payload])
