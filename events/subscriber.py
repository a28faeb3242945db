"""Follows the streams of many replicas: the asyncio shell around `stream.py`.

Each replica has a SUB socket for its events, and as needed a DEALER for replays; a native one also a SUB for its status
and a DEALER for snapshots. Every decision is the stream's; here bytes come and go.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from types import TracebackType

import zmq

from events.actions import Replay
from events.connection import Connection
from events.curve import secure_client
from events.feed import Feed
from events.messages import Frames
from events.native import SNAPSHOT_REQUEST, Status
from events.socket_reader import Receive, SocketReader, size_of
from events.source import Source
from events.view import CacheView, Request

TICK_S = 0.1  # for all replicas together: each time, a process that has nothing to do is woken
MENDING_TICK_S = 0.05  # while a stream is not exact
STANDSTILL_S = 0.5  # without a tick: a busy publisher may have filled all queues on the way meanwhile
KEEPALIVE_S = 1, 1, 3  # idle for so long, then so often, and so many times without an answer
UNANSWERED_MS = 4000  # what we sent: a request
RECONNECT_MS = 50
RECONNECT_TO_ASK_MS = 250  # nobody watches how these connections end, and each request has a new one
CONNECT_TIMEOUT_MS = 1000  # the system would try for minutes, and less and less often
# A prompt of a million tokens in one event; ZeroMQ ends the connection of whoever sends more.
MAX_FRAME_BYTES = 8 * 2**20
MAX_UNREAD = 2000  # messages that ZeroMQ keeps of each SUB socket; then its publisher has to wait, or drops some
MAX_UNREAD_ANSWERS = 256  # of a replay or snapshot; few, as they may be long, and are read as soon as there is room
MAX_WAITING_BYTES = 64 * 2**20  # of messages that wait while a long batch is applied; an event beyond is a gap
# An answer beyond is not read yet: the publisher still has it, but would not send it again.
MAX_WAITING_ANSWER_BYTES = MAX_WAITING_BYTES // 2
ANSWERS = "replay", "snapshot"

# Called with the socket that frames came by ("events", "replay", "status", "snapshot"; "connected" and "disconnected"
# without frames, for the event socket) and the frames, before they are acted on; with "tick" after the passing of time
# changed something; and with "standstill" when this process has not run for long. A feed that is given the same in the
# same order comes to the same view (recording.py).
Tap = Callable[[str, Frames], None]


class Subscriber:
    """Use as an async context manager; replicas come and go by `add` and `remove`."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        self._sockets: dict[str, _Sockets] = {}
        self._timer: asyncio.TimerHandle | None = None  # while there are any
        self._ticked_s = 0.0

    async def __aenter__(self) -> "Subscriber":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add(
        self,
        source: Source,
        view: CacheView | None = None,
        *,
        on_status: Callable[[Status], None] | None = None,
        tap: Tap | None = None,
    ) -> CacheView:
        if source.name in self._sockets:
            raise ValueError(f"a replica named {source.name!r} is already followed; names must differ")
        source.check()
        view = view or source.view()
        self._sockets[source.name] = _Sockets(self._context, source, Feed(view, on_status), tap)
        if self._timer is None:
            self._wait()
        return view

    def remove(self, name: str) -> None:
        self._sockets.pop(name).close()
        if not self._sockets and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def resync(self, name: str, reason: str) -> None:
        """Ask the replica for its whole cache, because the view is in doubt."""
        self._sockets[name].resync(reason)

    @property
    def stands_still(self) -> bool:
        """True if this process has not run for long, and no stream has been told of it yet."""
        return time.monotonic() - self._ticked_s > STANDSTILL_S

    def close(self) -> None:
        for name in list(self._sockets):
            self.remove(name)
        # A socket that an error has left open would make `term` wait for ever; all are of this thread.
        self._context.destroy(linger=0)

    def _wait(self) -> None:
        self._ticked_s = time.monotonic()
        loop = asyncio.get_running_loop()
        tick_s = TICK_S if all(sockets.exact for sockets in self._sockets.values()) else MENDING_TICK_S
        # At round times: what else ticks in this process wakes it at the same moment.
        self._timer = loop.call_at((loop.time() // tick_s + 1) * tick_s, self._tick)

    def _tick(self) -> None:
        stood_still = self.stands_still
        self._wait()
        for sockets in self._sockets.values():
            # One by one: what is raised for one ends nothing of the others.
            sockets.loop.call_soon(sockets.tick_late if stood_still else sockets.tick)


class _Sockets:
    """The sockets of one replica, and the feed they serve."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", source: Source, feed: Feed, tap: Tap | None) -> None:
        self._context = context
        self._source = source
        self._feed = feed
        self._tap = tap
        self.loop = asyncio.get_running_loop()
        self._readers: dict[str, SocketReader] = {}
        self._connections = 0
        self._closed = False
        self._subscriptions: dict[str, Connection] = {}
        self._waiting: deque[tuple[str, Frames]] = deque()  # for the end of a long batch
        self._waiting_bytes = 0
        self._taking: asyncio.Handle | None = None  # of what waits
        self._going = False  # a slice is to be done soon
        self._busy_since_s = 0.0
        self._doubt: str | None = None  # why all is to be asked for again then
        self._stood_still = False  # the stream is to be told
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        self._subscribe("events", self._source.events, self._source.topic, self._events, "monitor", self._monitored)
        if self._source.status is not None:
            receive = partial(self._receive, "status")
            self._subscribe("status", self._source.status, "", receive, "status monitor", self._status_monitored)

    def _subscribe(
        self, name: str, endpoint: str, topic: str, receive: Receive, monitor: str, observe: Receive
    ) -> None:
        socket = self._socket(zmq.SUB)
        self._readers[name] = SocketReader(self.loop, socket, receive)
        socket.subscribe(topic.encode())
        connection = Connection(self._source.name, socket, endpoint, time.monotonic())
        self._subscriptions[name] = connection
        self._readers[monitor] = SocketReader(self.loop, connection.monitor, observe)
        connection.open()

    def close(self) -> None:
        """Stop; also works within a callback, and sends no further request."""
        self._closed = True
        for name in self._subscriptions.keys() & self._readers.keys():
            # First of all: the I/O thread waits for ever to report an event to a monitor that nobody reads any more.
            self._readers[name].socket.disable_monitor()
        for name in list(self._readers):
            self._close(name)

    def resync(self, reason: str) -> None:
        if self._feed.view.busy:
            self._doubt = reason
        else:
            self._act(self._feed.resync(reason, time.monotonic()))

    # ---- a long batch

    def _act(self, requests: list[Request]) -> None:
        """Send a step's requests; do the rest of a long step in slices."""
        self._send(requests)
        if self._feed.view.busy and not self._going and not self._closed:
            self._going = True
            self._busy_since_s = time.monotonic()
            self.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        if self._closed:
            return
        view = self._feed.view
        try:
            self._send(view.go_on())
        finally:
            if view.busy:
                self.loop.call_soon(self._go_on)
            else:
                self._going = False
                view.stream.delayed(time.monotonic() - self._busy_since_s)
                self._take_soon()

    def _take_soon(self) -> None:
        if self._taking is None:
            self._taking = self.loop.call_soon(self._take_waiting)

    def _take_waiting(self) -> None:
        """Take messages that arrived during a long batch, one by one: one may be another long batch."""
        self._taking = None
        if self._closed or self._feed.view.busy:
            return
        if self._doubt is not None:
            reason, self._doubt = self._doubt, None
            self._take_soon()
            self.resync(reason)
        elif self._waiting:
            name, frames = self._waiting.popleft()
            self._waiting_bytes -= size_of(frames)
            self._take_soon()  # first: what is raised for one ends nothing of the others
            self._read_on()
            self._take(name, frames)

    def _read_on(self) -> None:
        """There is room for answers again."""
        for name in ANSWERS:
            if name in self._readers:
                self._readers[name].read_on()

    def _keep(self, name: str, messages: list[Frames]) -> None:
        for frames in messages:
            size = size_of(frames)
            if name != "events" or self._waiting_bytes + size <= MAX_WAITING_BYTES:
                self._waiting.append((name, frames))
                self._waiting_bytes += size

    def _take(self, name: str, frames: Frames) -> None:
        if name == "monitor":
            self._monitor(frames)
        elif name in self._readers:
            self._mark(name, frames)
            self._act(self._feed.receive(name, frames, time.monotonic()))

    @property
    def _must_wait(self) -> bool:
        return self._feed.view.busy or bool(self._waiting)

    # ---- what comes in

    def _monitored(self, messages: list[Frames]) -> bool:
        """Return True after a reconnect: unread messages came over the old connection."""
        again = False
        for position, frames in enumerate(messages):
            if self._closed:
                break
            if self._must_wait:
                self._keep("monitor", messages[position:])
                break
            again = self._monitor(frames) or again
        return again

    def _monitor(self, frames: Frames) -> bool:
        connection = self._subscriptions["events"]
        made = connection.observe(frames, time.monotonic())
        if made is None:
            return False
        if not made:
            self._mark("disconnected", [])
            self._feed.disconnected()
            if connection.paused:  # a publisher without room for this socket has none for those of requests
                self._drop("replay")
                self._drop("snapshot")
            return False
        again = bool(self._connections and (self._source.native or self._source.replay))
        if again:
            self._readers["events"].read_all()  # the repair covers it
            self._forget_waiting("events")
        self._connections += 1
        self._mark("connected", [])
        self._act(self._feed.connected(time.monotonic()))
        return again

    def _status_monitored(self, messages: list[Frames]) -> None:
        for frames in messages:
            self._subscriptions["status"].observe(frames, time.monotonic())

    def _events(self, messages: list[Frames]) -> None:
        # A handshake is reported before the first message of its connection can be read, so look for one now.
        if not self._monitored(self._readers["monitor"].read_all()) and not self._closed:
            self._receive("events", messages)

    def _receive(self, socket: str, messages: list[Frames]) -> None:
        reader = self._readers[socket]
        for position, frames in enumerate(messages):
            if self._readers.get(socket) is not reader:  # closed, or a request of ours voided the rest
                return
            if socket != "status" and self._must_wait:
                self._keep(socket, messages[position:])
                return
            self._take(socket, frames)

    def _answered(self, socket: str, messages: list[Frames]) -> None:
        """Read ahead, since a publisher drops batches for slow peers; apply them in order later."""
        self._keep(socket, messages)
        self._take_soon()

    def _mark(self, socket: str, frames: Frames) -> None:
        if self._tap is not None:
            self._tap(socket, frames)

    @property
    def exact(self) -> bool:
        return self._feed.view.stream.exact

    def tick_late(self) -> None:
        """Note that this process stood still."""
        self._stood_still = True
        self.tick()

    def tick(self) -> None:
        """Time passes."""
        if not self._closed and not self._must_wait:
            self._pass(time.monotonic())

    def _pass(self, now_s: float) -> None:
        stream = self._feed.view.stream
        exact = stream.exact
        if self._stood_still:
            self._stood_still = False
            self._mark("standstill", [])
            self._act(self._feed.stood_still(now_s))
        requests = [] if self._closed else self._feed.tick(now_s)
        if self._closed:
            return
        if requests or stream.exact != exact:
            self._mark("tick", [])
        self._act(requests)
        if not self._closed:
            for connection in self._subscriptions.values():
                connection.tick(now_s)

    # ---- what goes out

    def _send(self, requests: list[Request]) -> None:
        for request in requests:
            if self._closed:  # by a callback
                return
            if isinstance(request, Replay):
                if not self._feed.replay_ended:  # replies to an older request may still come: they go with their socket
                    self._drop("replay")
                self._ask("replay", self._source.replay, request.start.to_bytes(8, "big"))
            else:
                self._drop("snapshot")
                self._ask("snapshot", self._source.snapshot, SNAPSHOT_REQUEST)

    def _drop(self, name: str) -> None:
        """Close the socket, and drop its unread messages."""
        self._close(name)
        self._forget_waiting(name)

    def _forget_waiting(self, name: str) -> None:
        kept = [one for one in self._waiting if one[0] != name]
        if len(kept) != len(self._waiting):
            self._waiting = deque(kept)
            self._waiting_bytes = sum(size_of(frames) for _, frames in kept)
            self._read_on()

    def _room_for_answers(self) -> int:
        return MAX_WAITING_ANSWER_BYTES - self._waiting_bytes

    def _ask(self, name: str, endpoint: str | None, request: bytes) -> None:
        assert endpoint is not None, f"{self._source.name} has no {name} socket"
        if name not in self._readers:
            socket = self._socket(zmq.DEALER)
            try:
                socket.connect(endpoint)
            except zmq.ZMQError:
                socket.close()
                raise
            self._readers[name] = SocketReader(self.loop, socket, partial(self._answered, name), self._room_for_answers)
        self._feed.asked(name)
        self._readers[name].send([b"", request])

    # ---- sockets

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.linger = 0
        socket.rcvhwm = MAX_UNREAD if kind == zmq.SUB else MAX_UNREAD_ANSWERS
        socket.sndhwm = 0
        socket.reconnect_ivl = RECONNECT_MS if kind == zmq.SUB else RECONNECT_TO_ASK_MS
        socket.reconnect_ivl_max = 500
        socket.connect_timeout = CONNECT_TIMEOUT_MS
        socket.maxmsgsize = MAX_FRAME_BYTES
        # A peer that is gone without a word (a cut cable) counts as disconnected after a while. The kernel asks, not
        # ZeroMQ: libzmq 4.3.5 aborts the process when a heartbeat is due on a connection that broke while it was full.
        socket.tcp_keepalive = 1
        socket.tcp_keepalive_idle, socket.tcp_keepalive_intvl, socket.tcp_keepalive_cnt = KEEPALIVE_S
        socket.tcp_maxrt = UNANSWERED_MS
        if self._source.curve is not None:
            secure_client(socket, self._source.curve)
        return socket

    def _close(self, name: str) -> None:
        reader = self._readers.pop(name, None)
        if reader is not None:
            reader.close()
