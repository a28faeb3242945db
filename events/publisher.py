"""Publishes one replica's events as vLLM does, and beside that the native status and snapshot.

The engine's thread only appends to a queue. One thread of the publisher's own encodes, numbers, sends, answers replays
and snapshots, and keeps the mirror; it owns every socket.

Bind rules: every endpoint is bound (never connected, unlike vLLM's rule that `tcp://0.0.0.0:5557` connects); port 0
takes a free port, and the attributes `events`, `replay`, `status`, `snapshot` of `Publisher.endpoints` hold what was
bound. A data-parallel rank r adds r to every port that is not 0.
"""

import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import msgspec
import zmq
from msgspec import Struct

from events.curve import Curve, secure_server
from events.messages import EventBatch, KnownEvent, encode_batch
from events.mirror import Mirror
from events.native import SNAPSHOT_REQUEST, Load, SnapshotHeader, Status, encode_native

log = logging.getLogger(__name__)

END_OF_REPLAY = (b"", (-1).to_bytes(8, "big", signed=True), b"")
BATCHES_PER_TURN = 256


class PublisherConfig(Struct, frozen=True):
    """`None` for replay, status or snapshot leaves that socket out; without status and snapshot no mirror is kept."""

    events: str = "tcp://127.0.0.1:5557"
    replay: str | None = "tcp://127.0.0.1:5558"
    status: str | None = "tcp://127.0.0.1:5559"
    snapshot: str | None = "tcp://127.0.0.1:5560"
    topic: str = ""
    model: str = ""
    data_parallel_rank: int | None = None
    high_water_mark: int = 100_000
    replay_batches: int = 10_000
    queue_batches: int = 100_000
    curve: Curve | None = None


class Endpoints(Struct):
    events: str
    replay: str | None = None
    status: str | None = None
    snapshot: str | None = None


class PublisherStats(Struct):
    batches: int = 0
    events: int = 0
    payload_bytes: int = 0
    skipped_batches: int = 0
    unencodable_events: int = 0
    replays: int = 0
    snapshots: int = 0


class Publisher:
    """Use as a context manager, or call `close`."""

    def __init__(self, config: PublisherConfig | None = None) -> None:
        self.config = config or PublisherConfig()
        self.incarnation = secrets.randbits(63)
        self.stats = PublisherStats()
        self.seq = -1
        self._topic = self.config.topic.encode()
        self._mirror = Mirror() if self.config.status or self.config.snapshot else None
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=self.config.replay_batches)
        self._queue: deque[tuple[float, Sequence[KnownEvent]] | Load | None] = deque()
        self._sleeping = False
        self._closed = False
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._authenticator = self.config.curve.authenticator(self._context) if self.config.curve else None
        try:
            self._open()
        except zmq.ZMQError:
            self._shut()
            raise
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._thread = threading.Thread(target=self._serve, name="kv-events", daemon=True)
        self._thread.start()

    # ---- the engine's side

    def publish(self, events: Sequence[KnownEvent]) -> None:
        """Queues one batch. Never blocks, never raises; the events must not be changed afterwards."""
        if events:
            self._put((time.time(), events))

    def report(self, load: Load) -> None:
        """Sends a status that is true after everything published before it."""
        self._put(load)

    def close(self) -> None:
        """Sends what is queued, then closes the sockets."""
        if self._closed:
            return
        self._closed = True
        self._put(None)
        self._thread.join()
        self._shut()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _put(self, item: tuple[float, Sequence[KnownEvent]] | Load | None) -> None:
        self._queue.append(item)
        if self._sleeping:
            self._sleeping = False
            with suppress(BlockingIOError):  # the pipe is full of wake-ups already
                os.write(self._wake_write, b"\0")

    # ---- the thread's side

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_read, zmq.POLLIN)
        answers = {self._replay_socket: self._answer_replay, self._snapshot_socket: self._answer_snapshot}
        for socket in answers:
            if socket is not None:
                poller.register(socket, zmq.POLLIN)
        while True:
            # Order matters: an item queued before `_sleeping` is set is seen here, one queued after it writes the pipe.
            self._sleeping = True
            ready = dict(poller.poll(0 if self._queue else None))
            self._sleeping = False
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
            for socket, answer in answers.items():
                if socket is not None and socket in ready:
                    self._receive(socket, answer)
            for _ in range(min(len(self._queue), BATCHES_PER_TURN)):
                item = self._queue.popleft()
                if item is None:
                    return
                if isinstance(item, Load):
                    self._send_status(item)
                else:
                    self._send_batch(*item)

    def _send_batch(self, ts: float, events: Sequence[KnownEvent]) -> None:
        if len(self._queue) > self.config.queue_batches:
            self._skip_batch(events)
            return
        batch = EventBatch(ts, events, self.config.data_parallel_rank)  # type: ignore[arg-type]
        try:
            payload = encode_batch(batch)
            if self._mirror is not None:
                self._mirror.apply(events)
        except (TypeError, ValueError, OverflowError, msgspec.MsgspecError):
            batch.events = [event for event in events if self._encodes(event)]
            payload = encode_batch(batch)
            if self._mirror is not None:
                self._mirror.apply(batch.events)  # type: ignore[arg-type]
        # Only now is a number taken: a batch that cannot be encoded leaves no hole that nobody can fill.
        self.seq += 1
        self._buffer.append((self.seq, payload))
        self._events_socket.send_multipart((self._topic, self.seq.to_bytes(8, "big"), payload), copy=True)
        self.stats.batches += 1
        self.stats.events += len(batch.events)
        self.stats.payload_bytes += len(payload)

    def _skip_batch(self, events: Sequence[KnownEvent]) -> None:
        """Too far behind: the batch takes a number and reaches the mirror only. A visible gap, repaired by snapshot."""
        if not self.stats.skipped_batches:
            log.warning("more than %d batches wait to be sent; skipping until it is less", self.config.queue_batches)
        self.seq += 1
        self.stats.skipped_batches += 1
        if self._mirror is not None:
            self._mirror.apply([event for event in events if self._encodes(event)])

    def _encodes(self, event: KnownEvent) -> bool:
        try:
            encode_batch(EventBatch(0.0, [event]))
            if self._mirror is not None:
                Mirror().apply([event])
        except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
            if not self.stats.unencodable_events:
                log.error("an event cannot be encoded and is left out: %s: %r", error, event)
            self.stats.unencodable_events += 1
            return False
        return True

    def _send_status(self, load: Load) -> None:
        if self._status_socket is None or self._mirror is None:
            return
        digest = self._mirror.digest()
        status = Status(self.incarnation, self.seq, time.time(), digest.blocks, digest.xor, load)
        self._status_socket.send_multipart((self._topic, encode_native(status)))

    def _receive(self, socket: "zmq.Socket[bytes]", answer: object) -> None:
        assert callable(answer)
        while True:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) == 3 and frames[1] == b"":
                try:
                    answer(frames[0], frames[2])
                except zmq.ZMQError as error:
                    log.warning("an answer to a replay or snapshot request was not sent: %s", error)

    def _answer_replay(self, identity: bytes, request: bytes) -> None:
        if len(request) > 8:
            return
        start = int.from_bytes(request, "big")
        self.stats.replays += 1
        assert self._replay_socket is not None
        for seq, payload in list(self._buffer):
            if seq >= start:
                self._replay_socket.send_multipart((identity, b"", self._topic, seq.to_bytes(8, "big"), payload))
        self._replay_socket.send_multipart((identity, b"", *END_OF_REPLAY))

    def _answer_snapshot(self, identity: bytes, request: bytes) -> None:
        if request != SNAPSHOT_REQUEST or self._mirror is None:
            return
        self.stats.snapshots += 1
        now = time.time()
        batches = self._mirror.snapshot(now)
        header = SnapshotHeader(self.incarnation, self.seq, now, len(batches), self.config.model)
        assert self._snapshot_socket is not None
        for payload in (encode_native(header), *batches):
            self._snapshot_socket.send_multipart((identity, b"", payload))

    # ---- sockets

    def _open(self) -> None:
        config = self.config
        self._events_socket = self._bind(zmq.PUB, config.events, config.high_water_mark)
        # No high-water mark where an answer must arrive whole.
        self._replay_socket = self._bind(zmq.ROUTER, config.replay, 0) if config.replay else None
        self._status_socket = self._bind(zmq.PUB, config.status, 1000) if config.status else None
        self._snapshot_socket = self._bind(zmq.ROUTER, config.snapshot, 0) if config.snapshot else None
        self.endpoints = Endpoints(*(_bound(s) for s in (self._events_socket, self._replay_socket)))  # type: ignore[arg-type]
        self.endpoints.status = _bound(self._status_socket)
        self.endpoints.snapshot = _bound(self._snapshot_socket)

    def _bind(self, kind: int, endpoint: str, high_water_mark: int) -> "zmq.Socket[bytes]":
        endpoint = offset_port(endpoint, self.config.data_parallel_rank or 0)
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        self._sockets.append(socket)
        socket.sndhwm = high_water_mark
        socket.linger = 500
        if self.config.curve is not None:
            secure_server(socket, self.config.curve)
        elif not is_local(endpoint):
            log.warning("%s is readable by anyone who reaches it, and events carry prompts; use CURVE keys", endpoint)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise zmq.ZMQError(error.errno, f"cannot bind {endpoint}: {zmq.strerror(error.errno or 0)}") from error
        return socket

    def _shut(self) -> None:
        for socket in self._sockets:
            socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()


def _bound(socket: "zmq.Socket[bytes] | None") -> str | None:
    return None if socket is None else socket.getsockopt_string(zmq.LAST_ENDPOINT)


def offset_port(endpoint: str, rank: int) -> str:
    """The endpoint of a data-parallel rank: its port plus the rank, or its name with `_dp<rank>` for ipc and inproc."""
    if rank == 0:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}"
    address, _, port = endpoint.rpartition(":")
    return endpoint if port in ("0", "*") else f"{address}:{int(port) + rank}"


def is_local(endpoint: str) -> bool:
    return endpoint.startswith(("ipc://", "inproc://", "tcp://127.", "tcp://localhost:", "tcp://[::1]:"))
