"""Follows the streams of many replicas: the asyncio shell around `stream.py`.

Each replica has a SUB socket for its events, and as needed a DEALER for replays; a native one also a SUB for its status
and a DEALER for snapshots. Every decision is the stream's; here bytes come and go.
"""

import asyncio
import re
import time
from collections.abc import Callable
from types import TracebackType

import msgspec
import zmq
from msgspec import Struct
from zmq.utils.monitor import parse_monitor_message

from events.actions import Replay
from events.curve import CurveClient, secure_client
from events.feed import Feed
from events.messages import Frames
from events.native import SNAPSHOT_REQUEST, Status
from events.publisher import offset_port
from events.resolver import Resolver
from events.stream import Stream, StreamConfig
from events.view import CacheView, Request

TICK_S = 0.05  # for all replicas together: each time, a process that has nothing to do is woken
MESSAGES_PER_TURN = 200
MAX_FRAME_BYTES = 64 * 2**20
MAX_IPC_BYTES = 107  # what the address of a Unix socket has room for

_TCP = re.compile(r"tcp://[A-Za-z0-9_.:;%\[\]-]+:([0-9]{1,5})")
_LOCAL = re.compile(r"(?:ipc|inproc)://[^\0]+")

# Called with the socket that frames came by ("events", "replay", "status", "snapshot"; "connected" and "disconnected"
# without frames, for the event socket) and the frames, before they are acted on; and with "tick" after the passing of
# time changed something. A feed that is given the same in the same order comes to the same view (recording.py).
Tap = Callable[[str, Frames], None]


class Source(Struct, frozen=True):
    """Where one replica's stream is to be had. With `status` and `snapshot` it is a native one."""

    name: str
    events: str
    replay: str | None = None
    status: str | None = None
    snapshot: str | None = None
    topic: str = ""
    model: str = ""
    curve: CurveClient | None = None

    @property
    def native(self) -> bool:
        return self.snapshot is not None

    def check(self) -> None:
        """Refuses what could not be followed."""
        for field in ("events", "replay", "status", "snapshot"):
            endpoint = getattr(self, field)
            if endpoint is not None and not _can_connect(endpoint):
                raise ValueError(
                    f"{self.name}: {field} is {endpoint!r}; write tcp://HOST:PORT, ipc://PATH or inproc://NAME"
                )
        if self.status is not None and self.snapshot is None:
            raise ValueError(
                f"{self.name}: status is {self.status!r}, but there is no snapshot; name it too: a difference that the"
                " status shows is repaired from there"
            )

    def rank(self, rank: int) -> "Source":
        """The same replica's stream of another data-parallel rank."""
        moved = {
            field: offset_port(endpoint, rank)
            for field in ("events", "replay", "status", "snapshot")
            if (endpoint := getattr(self, field)) is not None
        }
        return msgspec.structs.replace(self, name=f"{self.name}/{rank}" if rank else self.name, **moved)

    def stream_config(self) -> StreamConfig:
        return StreamConfig(native=self.native, can_replay=self.replay is not None)

    def view(self) -> CacheView:
        return CacheView(self.name, Stream(self.stream_config()), Resolver(self.model, native=self.native))


class Subscriber:
    """Use as an async context manager; replicas come and go by `add` and `remove`."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        self._sockets: dict[str, _Sockets] = {}
        self._timer: asyncio.TimerHandle | None = None  # while there are any

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
            raise ValueError(f"a replica named {source.name!r} is followed already; names must differ")
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
        """Asks the replica for all that it holds, as what is known of it is doubted."""
        self._sockets[name].resync(reason)

    def close(self) -> None:
        for name in list(self._sockets):
            self.remove(name)
        # A socket that an error has left open would make `term` wait for ever; all are of this thread.
        self._context.destroy(linger=0)

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._wait()
        for sockets in self._sockets.values():
            sockets.loop.call_soon(sockets.tick)  # one by one: what is raised for one ends nothing of the others


def _can_connect(endpoint: str) -> bool:
    if tcp := _TCP.fullmatch(endpoint):
        return 1 <= int(tcp[1]) <= 65535
    return _LOCAL.fullmatch(endpoint) is not None and len(endpoint.encode()) <= len("ipc://") + MAX_IPC_BYTES


class _Sockets:
    """The sockets of one replica, and the feed they serve."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", source: Source, feed: Feed, tap: Tap | None) -> None:
        self._context = context
        self._source = source
        self._feed = feed
        self._tap = tap
        self.loop = asyncio.get_running_loop()
        self._readers: dict[str, _Reader] = {}
        self._connections = 0
        self._closed = False
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        events = self._socket(zmq.SUB)
        self._readers["events"] = _Reader(self.loop, events, self._events)
        events.subscribe(self._source.topic.encode())
        monitor = events.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._readers["monitor"] = _Reader(self.loop, monitor, self._monitored)
        events.connect(self._source.events)
        if self._source.status is not None:
            status = self._socket(zmq.SUB)
            self._readers["status"] = self._reader("status", status)
            status.subscribe(b"")
            status.connect(self._source.status)

    def close(self) -> None:
        """Also from within a callback: what is under way then ends without another request."""
        self._closed = True
        if "events" in self._readers:
            # First of all: the I/O thread waits for ever to report an event to a monitor that nobody reads any more.
            self._readers["events"].socket.disable_monitor()
        for name in list(self._readers):
            self._close(name)

    def resync(self, reason: str) -> None:
        self._send(self._feed.resync(reason, time.monotonic()))

    # ---- what comes in

    def _monitored(self, messages: list[Frames]) -> bool:
        """True if the socket is connected again: whatever is still unread came by the old connection."""
        again = False
        for frames in messages:
            if self._closed:
                break
            if parse_monitor_message(frames)["event"] == zmq.EVENT_DISCONNECTED:
                self._mark("disconnected", [])
                self._feed.disconnected()
                continue
            if self._connections and (self._source.native or self._source.replay):
                again = True
                self._readers["events"].read_all()  # the repair covers it
            self._connections += 1
            self._mark("connected", [])
            self._send(self._feed.connected(time.monotonic()))
        return again

    def _events(self, messages: list[Frames]) -> None:
        # A handshake is reported before the first message of its connection can be read, so look for one now.
        if not self._monitored(self._readers["monitor"].read_all()) and not self._closed:
            self._receive("events", messages)

    def _receive(self, socket: str, messages: list[Frames]) -> None:
        reader = self._readers[socket]
        for frames in messages:
            if self._readers.get(socket) is not reader:  # closed, or a request of ours voided the rest
                return
            self._mark(socket, frames)
            self._send(self._feed.receive(socket, frames, time.monotonic()))

    def _mark(self, socket: str, frames: Frames) -> None:
        if self._tap is not None:
            self._tap(socket, frames)

    def tick(self) -> None:
        """Time passes."""
        if not self._closed:
            self._pass(time.monotonic())

    def _pass(self, now_s: float) -> None:
        stream = self._feed.view.stream
        exact = stream.exact
        requests = self._feed.tick(now_s)
        if self._closed:
            return
        if requests or stream.exact != exact:
            self._mark("tick", [])
        self._send(requests)

    # ---- what goes out

    def _send(self, requests: list[Request]) -> None:
        for request in requests:
            if self._closed:  # by a callback
                return
            if isinstance(request, Replay):
                if not self._feed.replay_ended:  # replies to an older request may still come: they go with their socket
                    self._close("replay")
                self._ask("replay", self._source.replay, request.start.to_bytes(8, "big"))
            else:
                self._close("snapshot")
                self._ask("snapshot", self._source.snapshot, SNAPSHOT_REQUEST)

    def _ask(self, name: str, endpoint: str | None, request: bytes) -> None:
        assert endpoint is not None, f"{self._source.name} has no {name} socket"
        if name not in self._readers:
            socket = self._socket(zmq.DEALER)
            try:
                socket.connect(endpoint)
            except zmq.ZMQError:
                socket.close()
                raise
            self._readers[name] = self._reader(name, socket)
        self._feed.asked(name)
        self._readers[name].send([b"", request])

    # ---- sockets

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.linger = 0
        socket.rcvhwm = 100_000 if kind == zmq.SUB else 0
        socket.sndhwm = 0
        socket.reconnect_ivl = 50
        socket.reconnect_ivl_max = 500
        socket.maxmsgsize = MAX_FRAME_BYTES
        # A peer that is gone without a word (a cut cable) counts as disconnected.
        socket.heartbeat_ivl = 1000
        socket.heartbeat_timeout = 3000
        if self._source.curve is not None:
            secure_client(socket, self._source.curve)
        return socket

    def _reader(self, name: str, socket: "zmq.Socket[bytes]") -> "_Reader":
        return _Reader(self.loop, socket, lambda messages: self._receive(name, messages))

    def _close(self, name: str) -> None:
        reader = self._readers.pop(name, None)
        if reader is not None:
            reader.close()


class _Reader:
    """Calls `receive` with the messages of a socket, some hundred at a time so that others get their turn."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        socket: "zmq.Socket[bytes]",
        receive: Callable[[list[Frames]], object],
    ) -> None:
        self.socket = socket
        self._loop = loop
        self._receive = receive
        self._fd = socket.FD
        self._again: asyncio.Handle | None = None
        loop.add_reader(self._fd, self._drain)
        self._wake()

    def send(self, frames: Frames) -> None:
        self.socket.send_multipart(frames)
        self._wake()  # the descriptor is edge-triggered: a send may have swallowed its edge

    def read_all(self) -> list[Frames]:
        """What is there now, without calling `receive`."""
        messages: list[Frames] = []
        while part := self._read(MESSAGES_PER_TURN):
            messages += part
        return messages

    def close(self) -> None:
        if self._again is not None:
            self._again.cancel()
        self._loop.remove_reader(self._fd)
        self.socket.close()

    def _wake(self) -> None:
        if self._again is None:
            self._again = self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        if self._again is not None:
            self._again.cancel()
            self._again = None
        messages = self._read(MESSAGES_PER_TURN)
        if len(messages) == MESSAGES_PER_TURN:
            self._wake()
        if messages:
            self._receive(messages)

    def _read(self, limit: int) -> list[Frames]:
        messages: list[Frames] = []
        try:
            while len(messages) < limit:
                messages.append(self.socket.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            pass
        return messages
