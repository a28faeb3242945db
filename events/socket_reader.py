"""Reads a ZeroMQ socket on an event loop, a bounded part of it at a time."""

import asyncio
import math
from collections.abc import Callable

import zmq

from events.messages import Frames

MESSAGES_PER_TURN = 200

Receive = Callable[[list[Frames]], object]


def size_of(frames: Frames) -> int:
    return sum(map(len, frames))


class SocketReader:
    """Calls `receive` with the messages of a socket, some hundred at a time so that others get their turn.

    It reads no more than `room` says, in bytes, and then waits for `read_on`.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        socket: "zmq.Socket[bytes]",
        receive: Receive,
        room: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self.socket = socket
        self._loop = loop
        self._receive = receive
        self._room = room
        self._full = False  # there may be more, but no room for it
        self._fd = socket.FD
        self._again: asyncio.Handle | None = None
        loop.add_reader(self._fd, self._drain)
        self._wake()

    def send(self, frames: Frames) -> None:
        self.socket.send_multipart(frames)
        self._wake()  # the descriptor is edge-triggered: a send may have swallowed its edge

    def read_all(self) -> list[Frames]:
        """Return the pending messages, without calling `receive`."""
        messages: list[Frames] = []
        while part := self._read(MESSAGES_PER_TURN):
            messages += part
        return messages

    def read_on(self) -> None:
        if self._full:
            self._wake()

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
        room = self._room()
        messages = self._read(MESSAGES_PER_TURN, room)
        self._full = sum(map(size_of, messages)) >= room
        if len(messages) == MESSAGES_PER_TURN and not self._full:
            self._wake()
        if messages:
            self._receive(messages)

    def _read(self, limit: int, room: float = math.inf) -> list[Frames]:
        messages: list[Frames] = []
        try:
            while len(messages) < limit and room > 0:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
                messages.append(frames)
                room -= size_of(frames)
        except zmq.Again:
            pass
        return messages
