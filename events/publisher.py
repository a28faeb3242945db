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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
import zmq
from msgspec import Struct

from events.curve import Curve, secure_server
from events.messages import EventBatch, KnownEvent, encode_batch
from events.mirror import Mirror
from events.native import SNAPSHOT_REQUEST, Load, SnapshotHeader, Status, encode_native

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

log = logging.getLogger(__name__)

UNENCODABLE = (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError)
END_OF_REPLAY = (b"", (-1).to_bytes(8, "big", signed=True), b"")
BATCHES_PER_TURN = 256
REQUESTS_PER_TURN = 1000
MAX_REQUESTS = 1000
MAX_REQUEST_BYTES = 1024
SNAPSHOT_MESSAGES = 2000  # 4 million blocks


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
        self.failed: BaseException | None = None  # what has ended the thread; nothing is published any more
        self.seq = -1
        self._topic = self.config.topic.encode()
        self._mirror = Mirror() if self.config.status or self.config.snapshot else None
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=self.config.replay_batches)
        self._queue: deque[tuple[float, Sequence[KnownEvent]] | Load | None] = deque()
        self._sleeping = False
        self._closed = False
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._requests: dict[tuple[str, bytes], bytes] = {}  # the newest of each peer
        self._authenticator: ThreadAuthenticator | None = None
        try:
            if self.config.curve is not None:
                self._authenticator = self.config.curve.authenticator(self._context)
            self._open()
        except BaseException:
            self._shut()
            raise
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
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
        if self.failed is not None:
            return
        self._queue.append(item)
        if self._sleeping:
            self._sleeping = False
            with suppress(BlockingIOError):  # the pipe is full of wake-ups already
                os.write(self._wake_write, b"\0")

    # ---- the thread's side

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # where the thread ends: nobody further up could see it
            self.failed = error
            self._queue.clear()
            log.exception("publishing KV events has ended; consumers will see this replica as gone")
            self._shut()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_read, zmq.POLLIN)
        answering = {"replay": self._replay_socket, "snapshot": self._snapshot_socket}
        for socket in answering.values():
            if socket is not None:
                poller.register(socket, zmq.POLLIN)
        while True:
            # Order matters: an item queued before `_sleeping` is set is seen here, one queued after it writes the pipe.
            self._sleeping = True
            ready = dict(poller.poll(0 if self._queue or self._requests else None))
            self._sleeping = False
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
            for name, socket in answering.items():
                if socket is not None and socket in ready:
                    self._receive(name, socket)
            self._answer_one()
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
        except UNENCODABLE:
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
        if self._mirror is None:
            return
        try:
            self._mirror.apply(events)
        except UNENCODABLE:
            self._mirror.apply([event for event in events if self._encodes(event)])

    def _encodes(self, event: KnownEvent) -> bool:
        try:
            encode_batch(EventBatch(0.0, [event]))
            if self._mirror is not None:
                Mirror().apply([event])
        except UNENCODABLE as error:
            if not self.stats.unencodable_events:
                log.error("a %s cannot be published and is left out: %s", type(event).__name__, error)
            self.stats.unencodable_events += 1
            return False
        return True

    def _send_status(self, load: Load) -> None:
        if self._status_socket is None or self._mirror is None:
            return
        digest = self._mirror.digest()
        status = Status(self.incarnation, self.seq, time.time(), digest.blocks, digest.xor, load)
        self._status_socket.send_multipart((self._topic, encode_native(status)))

    def _receive(self, name: str, socket: "zmq.Socket[bytes]") -> None:
        for _ in range(REQUESTS_PER_TURN):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            known = len(frames) == 3 and frames[1] == b"" and (name == "replay" or frames[2] == SNAPSHOT_REQUEST)
            if known and len(self._requests) < MAX_REQUESTS:
                self._requests[name, frames[0]] = frames[2]

    def _answer_one(self) -> None:
        """One replay a turn, or one snapshot for all who wait for it: events go on in between."""
        if not self._requests:
            return
        (name, identity), request = next(iter(self._requests.items()))
        if name == "replay":
            del self._requests[name, identity]
            self._answer(self._replay_socket, identity, self._replay(request))
            return
        messages = self._snapshot()
        for peer in [peer for socket, peer in self._requests if socket == "snapshot"]:
            del self._requests["snapshot", peer]
            self._answer(self._snapshot_socket, peer, messages)

    def _answer(
        self, socket: "zmq.Socket[bytes] | None", identity: bytes, messages: Iterable[tuple[bytes, ...]]
    ) -> None:
        assert socket is not None
        try:
            for message in messages:
                socket.send_multipart((identity, b"", *message), zmq.NOBLOCK)
        except zmq.ZMQError as error:  # the peer is gone, or does not read: it may ask again
            log.info("an answer was not sent to the end: %s", error)

    def _replay(self, request: bytes) -> Iterator[tuple[bytes, ...]]:
        if len(request) > 8:
            return
        start = int.from_bytes(request, "big")
        self.stats.replays += 1
        for seq, payload in self._buffer:
            if seq >= start:
                yield self._topic, seq.to_bytes(8, "big"), payload
        yield END_OF_REPLAY

    def _snapshot(self) -> list[tuple[bytes, ...]]:
        assert self._mirror is not None
        self.stats.snapshots += 1
        now = time.time()
        batches = self._mirror.snapshot(now)
        header = SnapshotHeader(self.incarnation, self.seq, now, len(batches), self.config.model)
        return [(encode_native(header),), *((payload,) for payload in batches)]

    # ---- sockets

    def _open(self) -> None:
        config = self.config
        self._events_socket = self._bind(zmq.PUB, config.events, config.high_water_mark)
        # One whole answer fits below the high-water mark; a peer that reads none of it gets no second one.
        answer = config.replay_batches + 1
        self._replay_socket = self._bind(zmq.ROUTER, config.replay, answer) if config.replay else None
        self._status_socket = self._bind(zmq.PUB, config.status, 1000) if config.status else None
        self._snapshot_socket = self._bind(zmq.ROUTER, config.snapshot, SNAPSHOT_MESSAGES) if config.snapshot else None
        self.endpoints = Endpoints(*(_bound(s) for s in (self._events_socket, self._replay_socket)))  # type: ignore[arg-type]
        self.endpoints.status = _bound(self._status_socket)
        self.endpoints.snapshot = _bound(self._snapshot_socket)

    def _bind(self, kind: int, endpoint: str, high_water_mark: int) -> "zmq.Socket[bytes]":
        endpoint = offset_port(endpoint, self.config.data_parallel_rank or 0)
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        self._sockets.append(socket)
        socket.sndhwm = high_water_mark
        socket.linger = 500
        if kind == zmq.ROUTER:
            socket.router_mandatory = True
            socket.maxmsgsize = MAX_REQUEST_BYTES
            socket.heartbeat_ivl, socket.heartbeat_timeout = 5000, 15_000
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
