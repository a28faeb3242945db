"""Publishes one replica's events as vLLM does, and beside that the native status and snapshot.

The engine's thread only appends to a queue. One thread of the publisher's own encodes, numbers, sends, answers replays
and snapshots, and keeps the mirror; it owns every socket.

Bind rules: every endpoint is bound (never connected, unlike vLLM's rule that `tcp://0.0.0.0:5557` connects); port 0
takes a free port, and the attributes `events`, `replay`, `status`, `snapshot` of `Publisher.endpoints` hold what was
bound.
"""

import logging
import math
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec
import zmq
from msgspec import Struct

from events.messages import END_SEQ, AllBlocksCleared, EventBatch, KnownEvent, encode_batch
from events.mirror import Mirror
from events.native import SURE, Doubt, Load, SnapshotHeader, Status, encode_native
from events.sockets.curve import CurveKeys
from events.sockets.peers import INSPECT_S, BoundSocket, PublisherStats
from events.sockets.transfers import WAITING_MESSAGES, Message, Transfers

log = logging.getLogger(__name__)

UNENCODABLE = (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError)
END_OF_REPLAY = (b"", END_SEQ, b"")
BATCHES_PER_TURN = 256
WAITING_STATUSES = 100


class ReplayBuffer(dict[int, zmq.Frame]):
    """Drops the oldest first. A payload is one ZeroMQ message, whose bytes all receivers share."""

    def __init__(self, most_batches: int, most_bytes: int) -> None:
        super().__init__()
        self.kept_bytes = 0
        self._most_batches = most_batches
        self._most_bytes = most_bytes
        self._first = self._end = 0

    def append(self, seq: int, payload: zmq.Frame) -> None:
        self[seq] = payload
        self._end = seq + 1
        self.kept_bytes += len(payload)
        while self.kept_bytes > self._most_bytes or len(self) > self._most_batches:
            self.kept_bytes -= len(self.pop(self._first, b""))  # numbers that were skipped are holes
            self._first += 1

    def since(self, start: int) -> Iterator[tuple[int, zmq.Frame]]:
        """Yield batches from `start` to the current newest; batches dropped meanwhile are left out."""
        for seq in range(max(start, self._first), self._end):
            if (payload := self.get(seq)) is not None:
                yield seq, payload


if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator


class PublisherConfig(Struct, frozen=True):
    """`None` for replay, status or snapshot leaves that socket out; without status and snapshot no mirror is kept."""

    events: str = "tcp://127.0.0.1:5557"
    replay: str | None = "tcp://127.0.0.1:5558"
    status: str | None = "tcp://127.0.0.1:5559"
    snapshot: str | None = "tcp://127.0.0.1:5560"
    topic: str = ""
    model: str = ""
    high_water_mark: int = 1000  # batches that wait for one peer; a replay repairs the loss of more
    max_peers: int = 64  # the limit for each socket
    replay_batches: int = 10_000
    replay_bytes: int = 16 * 2**20  # the size of payloads; each takes twice its bytes, in Python and in ZeroMQ
    curve: CurveKeys | None = None
    doubt: Doubt = SURE  # until the first report


class Report(NamedTuple):
    load: Load
    doubt: Doubt


Item: TypeAlias = tuple[float, Sequence[KnownEvent]] | Report | None  # a batch with its time, a report, or the end


class EventEndpoints(Struct):
    events: str
    replay: str | None = None
    status: str | None = None
    snapshot: str | None = None


class Publisher:
    """Use as a context manager, or call `close`."""

    def __init__(self, config: PublisherConfig | None = None) -> None:
        self.config = config or PublisherConfig()
        self.incarnation = secrets.randbits(63)
        self.stats = PublisherStats()
        self.failed: BaseException | None = None  # the error that has ended the thread; nothing is published any more
        self.seq = -1
        self._doubt = self.config.doubt
        self._topic = self.config.topic.encode()
        self._mirror = Mirror() if self.config.status or self.config.snapshot else None
        self._buffer = ReplayBuffer(self.config.replay_batches, self.config.replay_bytes)
        self._queue: deque[Item] = deque()
        self._sleeping = False
        self._closed = False
        self._context = zmq.Context()
        self._bound: list[BoundSocket] = []
        self._inspect_at_s = 0.0
        self._to_inspect = False  # something came from peers
        self._authenticator: ThreadAuthenticator | None = None
        try:
            if self.config.curve is not None:
                self._authenticator = self.config.curve.authenticator(self._context)
            bind, own = self._bind, self.config
            self._events = bind(zmq.PUB, own.events, own.high_water_mark)
            self._replays = bind(zmq.ROUTER, own.replay, WAITING_MESSAGES) if own.replay else None
            self._status = bind(zmq.PUB, own.status, WAITING_STATUSES) if own.status else None
            self._snapshots = bind(zmq.ROUTER, own.snapshot, WAITING_MESSAGES) if own.snapshot else None
            others = self._replays, self._status, self._snapshots
            self.endpoints = EventEndpoints(
                self._events.endpoint, *(None if bound is None else bound.endpoint for bound in others)
            )
            replays = None if self._replays is None else self._replays.socket
            snapshots = None if self._snapshots is None else self._snapshots.socket
            self._transfers = Transfers(replays, self._replay, snapshots, self._snapshot, time.monotonic, self.stats)
        except BaseException:
            self._shut()
            raise
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    # ---- the engine's side

    def publish(self, events: Sequence[KnownEvent]) -> None:
        """Queue one batch. This never blocks and never raises; do not change the events afterwards."""
        if events:
            self._put((time.time(), events))

    def report(self, load: Load, doubt: Doubt = SURE) -> None:
        """Send a status that holds after everything published before it.

        `doubt` holds for snapshots too, until the next report. A cache that is cleared in doubt leaves a hole in the
        numbers of batches: a reader has to take a snapshot, which is labelled, and cannot believe the empty cache.
        """
        self._put(Report(load, doubt))

    def close(self) -> None:
        """Send queued batches, then close the sockets."""
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

    def _put(self, item: Item) -> None:
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
            while True:
                # Order matters: an item queued before it is set is seen here, one queued after it writes the pipe.
                self._sleeping = True
                waits = [0.0 if self._queue else None, self._transfers.wait_s()]
                if self._to_inspect:
                    waits.append(max(0.0, self._inspect_at_s - time.monotonic()))
                wait_ms = min((math.ceil(wait_s * 1000) for wait_s in waits if wait_s is not None), default=None)
                ready = dict(self._poller().poll(wait_ms))
                self._sleeping = False
                if self._wake_read in ready:
                    os.read(self._wake_read, 4096)
                self._watch_peers(ready)
                for bound in (self._replays, self._snapshots):
                    if bound is not None and bound.socket in ready:
                        self._transfers.receive(bound.socket)
                self._transfers.turn()
                for _ in range(min(len(self._queue), BATCHES_PER_TURN)):
                    item = self._queue.popleft()
                    if item is None:
                        return
                    if not isinstance(item, Report):
                        self._send_batch(*item)
                        continue
                    self._doubt = item.doubt
                    if self._status is not None and self._mirror is not None:
                        status = Status(self.incarnation, self.seq, time.time(), *self._mirror.digest(), *item)
                        self._status.socket.send_multipart((self._topic, encode_native(status)))
        except Exception as error:  # the thread ends here: nobody further up could see it
            self.failed = error
            self._queue.clear()
            log.exception("publishing KV events has stopped; consumers will treat this replica as gone")
            self._shut()

    def _poller(self) -> zmq.Poller:
        """Leave requests beyond the rate unread: they wait at their senders."""
        poller = zmq.Poller()
        poller.register(self._wake_read, zmq.POLLIN)
        for bound in self._bound:
            poller.register(bound.peers.monitor, zmq.POLLIN)
            if not self._to_inspect:
                poller.register(bound.peers.arrivals, zmq.POLLIN)
        for asked in (self._replays, self._snapshots):
            if asked is not None and self._transfers.may_receive:
                poller.register(asked.socket, zmq.POLLIN)
        return poller

    def _watch_peers(self, ready: Mapping[Any, int]) -> None:
        for bound in self._bound:
            if bound.peers.monitor in ready:
                bound.peers.watch()
            self._to_inspect |= bound.peers.arrivals.fileno() in ready
        now_s = time.monotonic()
        if self._to_inspect and now_s >= self._inspect_at_s:
            self._inspect_at_s = now_s + INSPECT_S
            self._to_inspect = False
            for bound in self._bound:
                bound.peers.inspect()

    def _send_batch(self, ts: float, events: Sequence[KnownEvent]) -> None:
        batch = EventBatch(ts, events)  # type: ignore[arg-type]
        try:
            payload = self._mirrored(batch)
        except UNENCODABLE:
            batch.events = [event for event in events if self._encodes(event)]
            payload = self._mirrored(batch)
        # Only now is a number taken: a batch that cannot be encoded leaves no hole that nobody can fill.
        self.seq += 1 + bool(self._doubt.reason and batch.events[:1] == [AllBlocksCleared()])
        shared = zmq.Frame(payload, copy=True)
        self._buffer.append(self.seq, shared)
        socket = self._events.socket
        socket.send(self._topic, zmq.SNDMORE)
        socket.send(self.seq.to_bytes(8, "big"), zmq.SNDMORE)
        socket.send(shared, copy=False)
        self.stats.batches += 1
        self.stats.events += len(batch.events)
        self.stats.payload_bytes += len(payload)

    def _mirrored(self, batch: EventBatch) -> bytes:
        payload = encode_batch(batch)
        if self._mirror is not None:
            self._mirror.apply(batch.events)  # type: ignore[arg-type]
        return payload

    def _encodes(self, event: KnownEvent) -> bool:
        try:
            encode_batch(EventBatch(0.0, [event]))
            if self._mirror is not None:
                Mirror().apply([event])
        except UNENCODABLE as error:
            if not self.stats.unencodable_events:
                log.error("cannot publish a %s, skipping it: %s", type(event).__name__, error)
            self.stats.unencodable_events += 1
            return False
        return True

    def _replay(self, request: bytes) -> Iterator[Message]:
        for seq, payload in self._buffer.since(int.from_bytes(request, "big")):
            yield self._topic, seq.to_bytes(8, "big"), payload
        yield b"", END_SEQ, zmq.Frame(b"")

    def _snapshot(self) -> list[Message]:
        assert self._mirror is not None
        now = time.time()
        batches = self._mirror.snapshot(now)
        header = SnapshotHeader(self.incarnation, self.seq, now, len(batches), self.config.model, self._doubt)
        return [(zmq.Frame(payload, copy=True),) for payload in (encode_native(header), *batches)]

    # ---- sockets

    def _bind(self, kind: int, endpoint: str, waiting_messages: int) -> BoundSocket:
        if self.config.curve is None and not is_local(endpoint):
            log.warning("%s is readable by anyone who reaches it, and events carry prompts; use CURVE keys", endpoint)
        elif self.config.curve is not None and self.config.curve.clients is None:
            log.warning("%s is readable by anyone who knows its public key, and events carry prompts", endpoint)
        bound = BoundSocket(
            self._context,
            kind,
            endpoint,
            waiting_messages=waiting_messages,
            most_peers=self.config.max_peers,
            curve=self.config.curve,
            stats=self.stats,
        )
        self._bound.append(bound)
        return bound

    def _shut(self) -> None:
        for bound in self._bound:
            bound.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()


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
