"""A gateway's connection: as much of HTTP/2 (RFC 9113) and gRPC as calls need whose messages go both ways.

Each stream is a call. Its messages are handed over as they are complete; while replies wait for the gateway to take
them, the next message waits, too, and what may come meanwhile is bounded by the window. A stream that breaks the
protocol ends its connection; what the protocol forbids and what does no harm is let pass. Padding, and heads beyond a
frame, come from no client of gRPC, and end the connection, too.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import TypeAlias
from urllib.parse import quote

from hpack import Decoder, HPACKError

from api.http.connection import Limits

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED, WITH_PRIORITY = 1, 1, 4, 8, 32
NO_ERROR, PROTOCOL_ERROR, FLOW_CONTROL_ERROR, FRAME_SIZE_ERROR, REFUSED_STREAM = 0, 1, 3, 6, 7
COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 9, 11
OK, INVALID_ARGUMENT, NOT_FOUND, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL = 0, 3, 5, 8, 12, 13  # of gRPC

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MAX_FRAME_BYTES = 16384  # both ways: nobody has to take more
MAX_WINDOW = 2**31 - 1
FIRST_WINDOW = 65535  # of the connection, and of streams until settings come
WINDOW_BYTES = 256 * 1024  # of a stream
MAX_HEAD_BYTES = MAX_FRAME_BYTES  # with 32 for each header, as peers are told: it is below that in its frame
MAX_BARE_FRAMES = 10_000  # in a second, without a message's bytes; a thousand calls have some four each
COSTLY_FRAMES = 100  # settings, and a stream that is reset before it asks anything, count as so many
MAX_UNSENT = 16  # heads and payloads of frames
PING_S, PONG_S = 60.0, 20.0  # a gateway whose machine is lost is noticed
LATER_S = 1.0  # the time that a gateway has to take what a finished call has to say
PRINTABLE = " !\"#$&'()*+,-./:;<=>?@[]_`{|}~"  # the others are escaped in gRPC's reasons


class Broken(Exception):
    """The gateway breaks the protocol in a way that has this code."""


def literal(name: bytes, value: bytes) -> bytes:
    """A header as HPACK has it without its tables, of a name and a value below 127 bytes."""
    return b"\0%c%b%c%b" % (len(name), name, len(value), value)


def number(value: int) -> bytes:
    return value.to_bytes(4, "big")


ANSWER_HEAD = b"\x88" + literal(b"content-type", b"application/grpc")  # :status 200
OpenCall: TypeAlias = "Callable[[Http2Connection, int, bytes], Call]"  # of this path; it may be finished at once


class Http2Connection(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self, others: dict["Http2Connection", None], open_call: OpenCall, limits: Limits, most: int) -> None:
        """Be one of these connections; messages have `most` bytes."""
        self.loop = asyncio.get_running_loop()
        self.max_message_bytes = most
        self.calls: dict[int, Call] = {}
        self.blocked: dict[Call, None] = {}  # those that wait for this connection's room alone
        self.is_full = False  # the gateway does not read
        self.room = self.room_of_call = FIRST_WINDOW  # bytes that the gateway takes, of all calls and of a new one
        self.limits, self._others, self._open_call = limits, others, open_call
        self._decoder = Decoder(max_header_list_size=MAX_HEAD_BYTES)
        self._unread = bytearray()
        self._unsent: list[bytes | memoryview] = []
        self._is_reading = self._greeted = self._retiring = False
        self._newest = 0  # the highest number of a stream
        self._unreported = 0  # bytes of the connection's window that are used
        self._bare_frames = 0
        self._heard_s = self.loop.time()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        if len(self._others) >= self.limits.connections:
            transport.abort()
            return
        self._others[self] = None
        self.send(SETTINGS, 0, 0, b"\0\4" + number(WINDOW_BYTES) + b"\0\6" + number(MAX_HEAD_BYTES))
        self.send(WINDOW_UPDATE, 0, 0, number(MAX_WINDOW - FIRST_WINDOW))
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._others.pop(self, None)
        for call in list(self.calls.values()):
            call.forget()

    def pause_writing(self) -> None:
        self.is_full = True
        self.transport.pause_reading()  # else answers to pings would fill memory

    def resume_writing(self) -> None:
        self.is_full = False
        self.transport.resume_reading()
        self._resume()
        self.flush()

    def _resume(self) -> None:
        for call in list(self.blocked):
            if self.room <= 0 or self.is_full:
                break
            call.guard(call.resume)

    def retire(self) -> None:
        """Close after the open calls."""
        self._retiring = True
        self.send(GOAWAY, 0, 0, number(self._newest) + number(NO_ERROR))
        self.flush()
        self.close_if_done()

    def close_if_done(self) -> None:
        if self._retiring and not self.calls:
            self.transport.close()

    def sweep(self, now_s: float) -> None:
        """End what is overdue; called once a second."""
        self._bare_frames = 0
        silent_s = now_s - self._heard_s
        if silent_s > (PING_S + PONG_S if self._greeted else self.limits.head_s):
            self.transport.abort()
        elif silent_s > PING_S:
            self.send(PING, 0, 0, bytes(8))
        if self._unreported:
            self.send(WINDOW_UPDATE, 0, 0, number(self._unreported))
            self._unreported = 0
        for call in list(self.calls.values()):
            if now_s > call.until_s:
                call.guard(call.overdue)
        self.flush()

    def send(self, kind: int, flags: int, stream: int, payload: bytes | memoryview = b"") -> None:
        self._unsent += b"%b%c%c%b" % (len(payload).to_bytes(3, "big"), kind, flags, number(stream)), payload
        if len(self._unsent) > MAX_UNSENT:
            self._write()

    def flush(self) -> None:
        """Write what is to be sent, unless more may follow at once."""
        if self._unsent and not self._is_reading:
            self._write()

    def _write(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(b"".join(self._unsent))
        self._unsent.clear()

    def data_received(self, data: bytes) -> None:
        self._heard_s, self._is_reading = self.loop.time(), True
        unread, at = self._unread, 0
        unread += data
        try:
            if not self._greeted and len(unread) >= len(PREFACE):
                if not unread.startswith(PREFACE):
                    raise Broken(PROTOCOL_ERROR)
                self._greeted, at = True, len(PREFACE)
            while self._greeted and len(unread) >= at + 9 and not self.transport.is_closing():
                end = at + 9 + int.from_bytes(unread[at : at + 3], "big")
                if end > at + 9 + MAX_FRAME_BYTES:
                    raise Broken(FRAME_SIZE_ERROR)
                if len(unread) < end:
                    break
                stream = int.from_bytes(unread[at + 5 : at + 9], "big") & MAX_WINDOW
                self._frame(unread[at + 3], unread[at + 4], stream, bytes(unread[at + 9 : end]))
                at = end
        except Broken as error:
            self.send(GOAWAY, 0, 0, number(self._newest) + number(error.args[0]))
            self._write()
            self.transport.close()
            at = len(unread)
        self._is_reading = False
        del unread[:at]
        self.flush()

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind != DATA or not payload:
            self._bare_frames += 1
            if self._bare_frames > MAX_BARE_FRAMES:
                raise Broken(ENHANCE_YOUR_CALM)
        is_early = kind in (DATA, RST_STREAM) and stream > self._newest
        if is_early or kind == CONTINUATION or (kind in (DATA, HEADERS) and flags & PADDED):
            raise Broken(PROTOCOL_ERROR)
        call = self.calls.get(stream)  # none if it is over
        if kind == HEADERS:
            self._headers(stream, flags, payload[5:] if flags & WITH_PRIORITY else payload)
        elif kind == DATA:
            self._unreported += len(payload)
            if call is not None:
                call.take(payload, end=bool(flags & END_STREAM))
        elif kind == RST_STREAM and call is not None:
            self._bare_frames += 0 if call.has_asked else COSTLY_FRAMES
            call.forget()
        elif kind == WINDOW_UPDATE and (call is not None or not stream):
            more, holder = int.from_bytes(payload[:4], "big") & MAX_WINDOW, call or self
            holder.room += more
            if not more or holder.room > MAX_WINDOW:
                raise Broken(FLOW_CONTROL_ERROR if more else PROTOCOL_ERROR)
            if call is None:
                self._resume()
            elif call.is_blocked:
                call.guard(call.resume)
        elif kind == SETTINGS and not flags & ACK:
            self._bare_frames += COSTLY_FRAMES
            for at in range(0, len(payload) - 5, 6):
                if payload[at : at + 2] == b"\0\4":
                    value = int.from_bytes(payload[at + 2 : at + 6], "big") & MAX_WINDOW
                    more, self.room_of_call = value - self.room_of_call, value
                    for one in list(self.calls.values()):
                        one.room += more
                        if one.is_blocked and more > 0:
                            one.guard(one.resume)
            self.send(SETTINGS, ACK, 0)
        elif kind == PING and not flags & ACK:
            self.send(PING, ACK, 0, payload)

    def _headers(self, stream: int, flags: int, block: bytes) -> None:
        """Open a call, or end an open one."""
        if not flags & END_HEADERS:
            raise Broken(PROTOCOL_ERROR)
        try:
            headers = self._decoder.decode(block, raw=True)  # also of a call that is over: it has one table
        except HPACKError:
            raise Broken(COMPRESSION_ERROR) from None
        call = self.calls.get(stream)
        if stream > self._newest:
            if not stream % 2:
                raise Broken(PROTOCOL_ERROR)
            self._newest = stream
            if self._retiring:
                self.send(RST_STREAM, 0, stream, number(REFUSED_STREAM))
                return
            call = self._open_call(self, stream, next((value for name, value in headers if name == b":path"), b""))
        if call is not None and flags & END_STREAM:
            call.take(b"", end=True)


class Call:
    """One call; subclasses `receive` its messages, and answer with `write` and `finish`."""

    def __init__(self, connection: Http2Connection, stream: int) -> None:
        self.until_s = connection.loop.time() + connection.limits.head_s  # it is overdue then
        self.room = connection.room_of_call
        self.is_blocked = False  # a reply waits for room
        self.has_asked = self._is_answered = self._has_ended = False
        self.connection = connection
        self._stream_number = stream
        self._window = WINDOW_BYTES
        self._unread = bytearray()
        self._replies: Iterator[bytes] = iter(())
        self._rest = memoryview(b"")  # of a reply of which a part is sent
        self._trailers: bytes | None = None
        connection.calls[stream] = self

    def receive(self, message: bytes) -> None:
        raise NotImplementedError

    def too_long(self, size: int) -> None:
        """A message would have so many bytes; it is not read."""
        limit = self.connection.max_message_bytes
        self.finish(RESOURCE_EXHAUSTED, f"a message has {size:,} bytes; at most {limit:,} are taken")

    def too_late(self) -> None:
        self.finish()

    def leave(self) -> None:
        """The call is over, for whatever reason; called once."""

    def write(self, replies: Iterable[bytes]) -> None:
        """Send these messages; each is made when there is room for it."""
        self._replies = chain(self._replies, replies) if self.is_blocked else iter(replies)
        self._send()

    def finish(self, status: int = OK, why: str = "") -> None:
        """End the call after what is written."""
        if self._trailers is None:
            told = literal(b"grpc-message", quote(why, PRINTABLE)[:120].encode()) if why else b""
            self._trailers = literal(b"grpc-status", b"%d" % status) + told
            self.until_s = self.connection.loop.time() + LATER_S
            self.leave()
            self._send()

    def guard(self, step: Callable[[], None]) -> None:
        """Run a step; an unexpected exception is logged, and ends this call alone: others share the connection."""
        try:
            step()
        except Exception:  # it ends this call alone
            logging.getLogger(__name__).exception("A call of a gateway failed")
            self.finish(INTERNAL, "internal error")

    def take(self, part: bytes, *, end: bool) -> None:
        """Take a part of the gateway's messages."""
        self._window -= len(part)
        if self._window < 0:
            raise Broken(FLOW_CONTROL_ERROR)
        self._unread += part
        self._has_ended = self._has_ended or end
        self.guard(self._read)

    def resume(self) -> None:
        self._send()
        self._read()

    def overdue(self) -> None:
        if self._trailers is None:
            self.too_late()
        else:
            self.connection.send(RST_STREAM, 0, self._stream_number, number(NO_ERROR))
            self.forget()

    def forget(self) -> None:
        connection = self.connection
        connection.blocked.pop(self, None)
        if connection.calls.pop(self._stream_number, None) is not None:
            if self._trailers is None:
                self._trailers = b""
                self.leave()
            connection.close_if_done()

    def _read(self) -> None:
        """Hand over the messages that are complete, until one has replies that the gateway does not take."""
        unread, connection = self._unread, self.connection
        while self._trailers is None and not self.is_blocked:
            end = 5 + int.from_bytes(unread[1:5], "big")
            if len(unread) >= 5 and unread[0]:
                self.finish(UNIMPLEMENTED, "the message is compressed; send it without compression")
            elif end - 5 > connection.max_message_bytes:
                self.too_long(end - 5)
            elif len(unread) < end:
                if self._has_ended:
                    self.finish()
                break
            else:
                with memoryview(unread) as view:
                    message = bytes(view[5:end])
                del unread[:end]
                self.has_asked = True
                self.receive(message)
        if self._trailers is None and not self.is_blocked and self._window < WINDOW_BYTES // 2:
            connection.send(WINDOW_UPDATE, 0, self._stream_number, number(WINDOW_BYTES - self._window))
            self._window = WINDOW_BYTES

    def _send(self) -> None:
        connection, stream = self.connection, self._stream_number
        if stream not in connection.calls:
            return
        self.is_blocked = False
        connection.blocked.pop(self, None)
        while True:
            if not self._rest:
                message = next(self._replies, None)
                if message is None:
                    break
                if not self._is_answered:
                    connection.send(HEADERS, END_HEADERS, stream, ANSWER_HEAD)
                self._is_answered, self._rest = True, memoryview(b"\0%b%b" % (number(len(message)), message))
            count = 0 if connection.is_full else min(len(self._rest), self.room, connection.room, MAX_FRAME_BYTES)
            if count <= 0:
                self.is_blocked = True
                if self.room > 0:
                    connection.blocked[self] = None
                break
            connection.send(DATA, 0, stream, self._rest[:count])
            self._rest = self._rest[count:]
            self.room -= count
            connection.room -= count
        if self._trailers is not None and not self.is_blocked:
            block = self._trailers if self._is_answered else ANSWER_HEAD + self._trailers
            connection.send(HEADERS, END_HEADERS | END_STREAM, stream, block)
            if not self._has_ended:  # the gateway need not send the rest of its messages
                connection.send(RST_STREAM, 0, stream, number(NO_ERROR))
            self.forget()
        connection.flush()
