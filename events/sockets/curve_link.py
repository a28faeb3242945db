"""A link encrypted by libzmq, which alone speaks CURVE.

libzmq keeps a message that has not ended without a bound. Only the holder of the replica's secret key can send one
here, and each part takes 35 bytes on its way at least: the kernel's count of bytes that came bounds the parts as well.
"""

from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from events.messages import Frames
from events.sockets.curve import CurveClient, secure_client
from events.sockets.link import (
    CONNECT_TIMEOUT_S,
    HANDSHAKE_S,
    KEEPALIVE_S,
    RECONNECT_S,
    RETRY_AT_MOST_S,
    RETRY_S,
    UNANSWERED_MS,
    Link,
    size_of,
)
from events.sockets.peers import PeerConnection, connection_at
from events.sockets.zmtp import MAX_PARTS

MESSAGES_PER_TURN = 200
BYTES_PER_TURN = 8 * 2**20
SHORT_PART_BYTES, LONG_PART_BYTES = 35, 42  # around a part: header, name of the command, nonce, seal and flags
MAX_UNREAD_MESSAGES = 2000


class CurveLink(Link):
    """Each connection has a socket of its own, so that what it leaves unread goes with it."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", curve: CurveClient, *arguments: Any, **options: Any
    ) -> None:
        self._context = context
        self._curve = curve
        self._to_send: list[Frames] = []
        self._socket: zmq.Socket[bytes] | None = None
        super().__init__(*arguments, **options)

    def send(self, frames: Frames) -> None:
        if self._socket is None:
            self._to_send.append(frames)
        else:
            self._socket.send_multipart(frames)
            self._drain_soon()  # the descriptor is edge-triggered: a send may have swallowed its edge

    def tick(self) -> None:
        if self._socket is None or self._connection is None or (now := connection_at(self._descriptor)) is None:
            return
        unread_bytes = now.received - self._read_bytes if now.ends == self._connection.ends else 0
        if unread_bytes > 2 * self._most_bytes and not self._socket.poll(0):
            self._cut_off(f"a message of more than {self._most_bytes:,} bytes")

    def close(self) -> None:
        super().close()
        if self._socket is not None:
            # First of all: the I/O thread waits for ever to report an event to a monitor that nobody reads any more.
            self._socket.disable_monitor()
            for socket in (self._monitor, self._socket):
                self._loop.remove_reader(socket.FD)
                socket.close()
            self._socket = None

    def _open(self) -> None:
        self._socket = socket = self._context.socket(zmq.DEALER if self._topic is None else zmq.SUB)
        self._monitor: zmq.Socket[bytes] = socket.get_monitor_socket(
            zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self._connection: PeerConnection | None = None
        self._read_bytes = 0
        for each in (socket, self._monitor):
            self._loop.add_reader(each.FD, self._drain)
        socket.linger = 0
        socket.rcvhwm, socket.sndhwm = MAX_UNREAD_MESSAGES, 0
        socket.reconnect_ivl, socket.reconnect_ivl_max = int(RETRY_S * 1000), int(RETRY_AT_MOST_S * 1000)
        socket.connect_timeout, socket.handshake_ivl = int(CONNECT_TIMEOUT_S * 1000), int(HANDSHAKE_S * 1000)
        socket.maxmsgsize = self._most_bytes  # the limit for a part
        # The kernel asks whether the peer is there, not ZeroMQ: libzmq 4.3.5 aborts the process when a heartbeat is due
        # on a connection that broke while it was full.
        socket.tcp_keepalive = 1
        socket.tcp_keepalive_idle, socket.tcp_keepalive_intvl, socket.tcp_keepalive_cnt = KEEPALIVE_S
        socket.tcp_maxrt = UNANSWERED_MS
        secure_client(socket, self._curve)
        if self._topic is not None:
            socket.subscribe(self._topic)
        socket.connect(self.endpoint)
        for frames in self._to_send:
            socket.send_multipart(frames)
        self._to_send.clear()
        self._drain_soon()

    def _cut_off(self, what: str) -> None:
        self._warn(f"sends {what}; closing the connection")
        self.close()
        self._has_ended(RECONNECT_S)

    def _drain(self) -> None:
        self._cancel()
        # Take note of a connection before anything that came by it is read.
        while self._socket is not None and self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            if event["event"] == zmq.EVENT_CONNECTED:
                self._descriptor = int(event["value"])
                self._connection = connection_at(self._descriptor)
            elif event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._is_made()
            else:
                self.close()
                self._has_ended()
        messages: list[Frames] = []
        room = self._room()
        taken = 0
        while len(messages) < MESSAGES_PER_TURN and taken < min(room, BYTES_PER_TURN) and (frames := self._read()):
            messages.append(frames)
            taken += size_of(frames)
        self._full = taken >= room
        more = len(messages) == MESSAGES_PER_TURN or taken >= BYTES_PER_TURN
        if more and not self._full and self._socket is not None:
            self._drain_soon()
        if messages:
            self._receive(messages)

    def _read(self) -> Frames:
        """Return the next message; none if there is none, or it has too many parts."""
        frames: Frames = []
        while self._socket is not None and (not frames or self._socket.getsockopt(zmq.RCVMORE)):
            if len(frames) == MAX_PARTS:
                self._cut_off(f"a message of more than {MAX_PARTS} parts")
                return []
            try:
                part = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            frames.append(part)
            self._read_bytes += len(part) + (SHORT_PART_BYTES if len(part) < 223 else LONG_PART_BYTES)
        return frames
