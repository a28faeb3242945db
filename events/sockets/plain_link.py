"""A link in plain text: this process reads the connection itself, so that nothing of a peer waits out of its sight."""

import asyncio
import socket as network
from contextlib import suppress
from typing import Any

from events.messages import Frames
from events.sockets.link import CONNECT_TIMEOUT_S, HANDSHAKE_S, KEEPALIVE_S, RECONNECT_S, UNANSWERED_MS, Link
from events.sockets.zmtp import Zmtp, ZmtpError, message, subscription

FRAMES_PER_TURN = 600  # then others get their turn
MAX_UNSENT_BYTES = 4096  # a peer that sends heartbeats and reads no answers may leave this much unread


class PlainLink(Link, asyncio.Protocol):
    """A link whose unread bytes wait in the kernel, and then at the peer."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._transport: asyncio.Transport | None = None
        self._to_send: list[bytes] = []  # once it is connected
        self._broke_rules = False
        self._closed = False
        super().__init__(*arguments, **options)

    def send(self, frames: Frames) -> None:
        if self._transport is not None and self._zmtp.ready:
            self._transport.write(message(frames))
        else:
            self._to_send.append(message(frames))

    def close(self) -> None:
        super().close()
        self._closed = True
        self._connecting.cancel()
        if self._transport is not None:
            self._transport.abort()

    def _open(self) -> None:
        self._connecting = self._loop.create_task(self._connect())

    async def _connect(self) -> None:
        kind, _, place = self.endpoint.partition("://")
        host, _, port = place.rpartition(":")
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                if kind == "ipc":
                    path = f"\0{place[1:]}" if place.startswith("@") else place
                    await self._loop.create_unix_connection(lambda: self, path)
                else:
                    await self._loop.create_connection(lambda: self, host.strip("[]"), int(port))
        except (OSError, UnicodeError):  # UnicodeError: no name can be like that
            self._later(self._reconnects.retry(), self._open)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if self._closed:
            transport.abort()
            return
        self._transport = transport
        self._zmtp = Zmtp(b"DEALER" if self._topic is None else b"SUB", self._most_bytes)
        connected: network.socket = transport.get_extra_info("socket")
        if connected.family != network.AF_UNIX:  # a peer may be gone without a word, as at a cut cable
            connected.setsockopt(network.SOL_SOCKET, network.SO_KEEPALIVE, 1)
            names = "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT"
            for name, value in zip(names, (*KEEPALIVE_S, UNANSWERED_MS), strict=True):
                with suppress(AttributeError, OSError):  # not every system has all of them
                    connected.setsockopt(network.IPPROTO_TCP, getattr(network, name), value)
        transport.write(self._zmtp.opening)
        self._later(HANDSHAKE_S, transport.abort)

    def connection_lost(self, error: Exception | None) -> None:
        del error
        self._transport = None
        if not self._closed:
            broke_rules, self._broke_rules = self._broke_rules, False
            self._has_ended(RECONNECT_S if broke_rules else 0.0)

    def data_received(self, data: bytes) -> None:
        self._zmtp.feed(data)
        self._drain()

    def _drain(self) -> None:
        transport, zmtp = self._transport, self._zmtp
        if transport is None or transport.is_closing():
            return
        if self._room() <= 0:
            self._full = True
            transport.pause_reading()
            return
        was_ready = zmtp.ready
        try:
            messages = zmtp.take(FRAMES_PER_TURN)
        except ZmtpError as error:
            self._broke_rules = True
            self._warn(f"sends {error}; closing the connection")
            transport.abort()
            return
        if zmtp.reply and transport.get_write_buffer_size() < MAX_UNSENT_BYTES:
            transport.write(zmtp.reply)
        zmtp.reply = b""
        is_made = zmtp.ready and not was_ready
        if is_made:
            self._cancel()  # the deadline of the handshake
            if self._topic is not None:
                transport.write(subscription(self._topic))
            transport.writelines(self._to_send)
            self._to_send.clear()
        # An error of one message ends nothing of the others: the next turn is arranged first.
        if zmtp.more:
            transport.pause_reading()
            self._drain_soon()
        elif not transport.is_reading():
            transport.resume_reading()
        if is_made:
            self._is_made()
        if messages and self._transport is transport and not self._closed:
            self._receive(messages)
