"""A blocking socket between two replicas: each wait ends at a deadline, after a stall, or when it is cancelled."""

import math
import re
import select
import socket
import threading
import time
from collections import Counter
from contextlib import suppress

from msgspec import Struct

from replica.messages import NeighbourSnapshot
from replica.neighbours.messages import LEASE_S, LENGTH, FromSource, Lost, Read, encode
from replica.neighbours.sealed import SEAL_BYTES, NotProven, Session

STALL_S = 2.0  # a peer that neither sends nor takes a byte for this long is given up
LOOK_S = 0.05  # how soon a cancelled wait ends
NO_PAYLOAD = memoryview(b"")


class NeighbourConfig(Struct, frozen=True, kw_only=True):
    """The names and the secret that both sides show, and the limits of what a source serves."""

    secret: bytes
    model: str
    kv_layout: str
    block_size: int
    most_tokens: int  # the longest prompt
    lease_s: float = LEASE_S
    stall_s: float = STALL_S
    turn_s: float = 1.0  # how long a reader waits for its turn
    handshake_s: float = 2.0
    most_readers: int = 64
    streams: int = 2


class Patience:
    """How long one exchange may take."""

    def __init__(self, until_s: float, cancelled: threading.Event | None = None, stall_s: float = STALL_S) -> None:
        self.until_s = until_s
        self.stall_s = stall_s
        self.cancelled = cancelled

    def within(self, limit_s: float) -> "Patience":
        """Return one that ends after `limit_s` at the latest."""
        return Patience(min(self.until_s, time.monotonic() + limit_s), self.cancelled, self.stall_s)

    def without_stall(self) -> "Patience":
        return Patience(self.until_s, self.cancelled, math.inf)

    def check(self, moved_s: float) -> float:
        """Return how long to wait next; raise Lost if no longer. The last byte moved at `moved_s`."""
        now_s = time.monotonic()
        if self.cancelled is not None and self.cancelled.is_set():
            raise Lost("cancelled")
        if now_s >= self.until_s:
            raise Lost("deadline")
        if now_s >= moved_s + self.stall_s:
            raise Lost("stalled", f"the peer has not moved a byte for {self.stall_s:g} s")
        left_s = min(self.until_s, moved_s + self.stall_s) - now_s
        return left_s if self.cancelled is None else min(left_s, LOOK_S)


class Connection:
    """Sends and receives bytes and, once it has a session, frames."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self.session: Session | None = None
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._head = bytearray(LENGTH.size + SEAL_BYTES)

    def close(self) -> None:
        self._socket.close()

    def shut(self) -> None:
        """End the waits of other threads on it; they close it."""
        with suppress(OSError):  # it was not connected any more
            self._socket.shutdown(socket.SHUT_RDWR)

    @property
    def is_quiet(self) -> bool:
        """True if the peer has neither closed it nor sent what nobody asked for."""
        return not self._poll(select.POLLIN, 0)

    def wait_for_more(self, wait_s: float) -> bool:
        """Wait for the peer to say something; False if it closes the connection, or says nothing for so long."""
        try:
            return self._poll(select.POLLIN, wait_s) and bool(self._socket.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    # ---- bytes

    def receive_into(self, view: memoryview, patience: Patience) -> None:
        filled, moved_s = 0, time.monotonic()
        while filled < len(view):
            wait_s = patience.check(moved_s)
            try:
                count = self._socket.recv_into(view[filled:])
            except BlockingIOError:
                self._poll(select.POLLIN, wait_s)
                continue
            except OSError as error:
                raise Lost("closed", str(error)) from error
            if not count:
                raise Lost("closed", "the peer has closed the connection")
            filled += count
            moved_s = time.monotonic()

    def receive(self, size: int, patience: Patience) -> bytes:
        buffer = bytearray(size)
        self.receive_into(memoryview(buffer), patience)
        return bytes(buffer)

    def send(self, patience: Patience, *parts: bytes | memoryview) -> None:
        left = [memoryview(part).cast("B") for part in parts if len(part)]
        moved_s = time.monotonic()
        while left:
            wait_s = patience.check(moved_s)
            try:
                count = self._socket.sendmsg(left)
            except BlockingIOError:
                self._poll(select.POLLOUT, wait_s)
                continue
            except OSError as error:
                raise Lost("closed", str(error)) from error
            moved_s = time.monotonic()
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]

    def _poll(self, events: int, wait_s: float) -> bool:
        poll = select.poll()  # `select.select` takes no descriptor above 1023
        poll.register(self._socket, events)
        return bool(poll.poll(math.ceil(wait_s * 1000)))

    # ---- frames

    def send_frame(self, message: Read | FromSource, patience: Patience, payload: memoryview = NO_PAYLOAD) -> None:
        """Send a sealed message, and the payload after it."""
        assert self.session is not None, "a frame is sent before the handshake"
        body = encode(message)
        self.send(patience, LENGTH.pack(len(body)) + self.session.seal(body) + body, payload)

    def receive_frame(self, most_bytes: int, patience: Patience) -> bytes:
        """Return the body of the next frame; Lost if its seal is wrong or it is too long."""
        assert self.session is not None, "a frame is received before the handshake"
        head = memoryview(self._head)
        self.receive_into(head, patience)
        (size,) = LENGTH.unpack_from(head)
        if size > most_bytes:
            raise Lost("size", f"a frame of {size} bytes; at most {most_bytes} are taken")
        body = self.receive(size, patience)
        try:
            self.session.check(head[LENGTH.size :], body)
        except NotProven as error:
            raise Lost("proof", str(error)) from error
        return body


_ENDPOINT = re.compile(r"tcp://(?:\[([0-9A-Fa-f:.]{2,45})\]|(\*|[\w.-]{1,253})):(\d{1,5})")


def host_and_port(endpoint: str) -> tuple[str, int]:
    """Split an endpoint, with 0.0.0.0 for *; raise ValueError if it is none."""
    found = _ENDPOINT.fullmatch(endpoint)
    if found is None or int(found[3]) > 65535:
        raise ValueError(f"{endpoint!r} is not an endpoint; write tcp://HOST:PORT")
    host = found[1] or found[2]
    return "0.0.0.0" if host == "*" else host, int(found[3])


class Counts:
    """The sums of all peers; several threads add to them."""

    def __init__(self) -> None:
        self.blocks = 0
        self.bytes = 0
        self.seconds = 0.0
        self.failures: Counter[str] = Counter()  # failures by reason
        self._lock = threading.Lock()

    def add(self, payload_bytes: int) -> None:
        with self._lock:
            self.blocks += 1
            self.bytes += payload_bytes

    def took(self, seconds: float) -> None:
        with self._lock:
            self.seconds += seconds

    def fail(self, reason: str) -> None:
        with self._lock:
            self.failures[reason] += 1

    def snapshot(self) -> NeighbourSnapshot:
        return NeighbourSnapshot(
            blocks=self.blocks, bytes=self.bytes, seconds=self.seconds, failures=dict(self.failures)
        )
