"""ZMTP 3.0 in plain text, without I/O, as a client speaks it that subscribes (SUB) or asks (DEALER).

libzmq collects the parts of a message out of reach of its user, and bounds neither how many there are nor what they
take together. Here a message is refused at the first byte that is too much. See https://rfc.zeromq.org/spec/23.
"""

from events.messages import Frames

MAX_PARTS = 8  # the limit for a message; an event has three, a replayed one four
MORE, LONG, COMMAND = 1, 2, 4  # flags of a frame
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_OLD = b"\0", b"\1", b"\2"
ANSWERED_BY = {b"SUB": (b"PUB", b"XPUB"), b"DEALER": (b"ROUTER", b"DEALER", b"REP")}


class ZmtpError(Exception):
    """The peer has broken the protocol or one of our limits; the connection is of no more use."""


def frame(body: bytes, flags: int = 0) -> bytes:
    if len(body) > 255:
        return bytes([flags | LONG]) + len(body).to_bytes(8, "big") + body
    return bytes([flags, len(body)]) + body


def message(frames: Frames) -> bytes:
    return b"".join([*(frame(part, MORE) for part in frames[:-1]), frame(frames[-1])])


def subscription(topic: bytes) -> bytes:
    return frame(b"\x01" + topic)


class Zmtp:
    """One connection. Send `opening`; `feed` what comes and `take` messages while there is `more`; send `reply`."""

    def __init__(self, kind: bytes, most_bytes: int) -> None:
        self.opening = GREETING + frame(b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind, COMMAND)
        self.ready = False  # the handshake is over
        self.more = False  # `take` has left whole frames
        self.reply = b""  # to the last heartbeat
        self._kind = kind
        self._most_bytes = most_bytes  # the limit for a message
        self._greeted = False
        self._unread: bytes | bytearray = b""
        self._at = 0  # all before it has been read
        self._parts: Frames = []  # parts of a message that has not ended
        self._parts_bytes = 0

    def feed(self, data: bytes) -> None:
        if self._at == len(self._unread):
            self._unread = data
        else:
            if isinstance(self._unread, bytes):  # many small pieces would weigh more than their bytes
                self._unread = bytearray(self._unread)
            del self._unread[: self._at]
            self._unread += data
        self._at = 0

    def take(self, most_frames: int) -> list[Frames]:
        """Return the messages that are whole, of so many frames at most; raise ZmtpError."""
        self.more = False
        if not self._greeted and not self._greeting():
            return []
        messages: list[Frames] = []
        unread, at, end = self._unread, self._at, len(self._unread)
        for _ in range(most_frames):
            if end - at < 2:
                break
            flags = unread[at]
            if flags & LONG:
                if end - at < 9:
                    break
                body = at + 9
                size = int.from_bytes(unread[at + 1 : body], "big")
            else:
                body = at + 2
                size = unread[at + 1]
            if self._parts_bytes + size > self._most_bytes:
                raise ZmtpError(f"a message of more than {self._most_bytes:,} bytes")
            if body + size > end:
                break
            at = body + size
            part = bytes(unread[body:at])
            if flags & COMMAND or not self.ready:
                self._command(part, flags)
                continue
            self._parts.append(part)
            if not flags & MORE:
                messages.append(self._parts)
                self._parts, self._parts_bytes = [], 0
            elif len(self._parts) == MAX_PARTS:
                raise ZmtpError(f"a message of more than {MAX_PARTS} parts")
            else:
                self._parts_bytes += size
        else:
            self.more = True
        self._at = at
        return messages

    def _greeting(self) -> bool:
        greeting = bytes(self._unread[: len(GREETING)])
        if greeting[:1] not in (b"", b"\xff") or greeting[9:10] not in (b"", b"\x7f") or greeting[10:11] in _OLD:
            raise ZmtpError("no greeting of ZMTP 3")
        if len(greeting) < len(GREETING):
            return False
        if (mechanism := greeting[12:32].rstrip(b"\0")) != b"NULL":
            raise ZmtpError(f"the security mechanism {mechanism!r}; give this client its keys")
        self._greeted, self._at = True, len(GREETING)
        return True

    def _command(self, body: bytes, flags: int) -> None:
        name, rest = body[1 : 1 + body[0]] if body else b"", body[1 + body[0] :] if body else b""
        if name == b"PING" and self.ready:
            self.reply = frame(b"\x04PONG" + rest[2:18], COMMAND)
        elif name == b"ERROR":
            raise ZmtpError(f"the error {rest[1:100]!r}")
        elif not self.ready:
            if not flags & COMMAND or name != b"READY" or _socket_type(rest) not in ANSWERED_BY[self._kind]:
                raise ZmtpError(f"{body[:100]!r} as the handshake; {self._kind.decode()} needs another kind of socket")
            self.ready = True


def _socket_type(metadata: bytes) -> bytes:
    at = 0
    while at < len(metadata):
        name = metadata[at + 1 : (value := at + 1 + metadata[at])]
        at = value + 4 + int.from_bytes(metadata[value : value + 4], "big")
        if name.lower() == b"socket-type":
            return metadata[value + 4 : at]
    return b""
