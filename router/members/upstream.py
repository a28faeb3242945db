"""Keep-alive connections to one replica: a request goes out as bytes, the answer comes back by callbacks, unparsed.

No task runs per request. Nothing here decides: the listener judges a broken connection.
"""

import asyncio
import socket
import ssl
from collections import deque
from typing import Protocol

import httptools
from msgspec import Struct

from router.members.broken import NETWORK_FAULTS, SHORTAGES, Broken, is_one_of
from router.members.spec import Target

MAX_HEAD_BYTES = 64 * 1024
MAX_IDLE = 1024
LONG_READ_BYTES = 128 * 1024  # after such a read others have their turn: uvloop would make up to 32 of them at once
IDLE_LIMIT_S = 60.0  # our replicas keep connections for 75 s
SURE_IDLE_S = 1.0  # few servers close a connection this soon: for requests that must not arrive twice
# A machine that lost its power says nothing: its connections end after a minute. Not every system has all of these.
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
Header = tuple[bytes, bytes]


class Listener(Protocol):
    """Receiver of an answer; after `complete` or `broke`, nothing more comes."""

    def answered(self, status: int, headers: list[Header]) -> None: ...
    def received(self, body: bytes, complete: bool) -> None: ...  # the bytes of one read of the socket
    def broke(self, broken: Broken) -> None: ...


class Sending(Struct, eq=False):
    """One request under way; `cancel` closes its connection, so that the replica stops working on it."""

    _upstream: "Upstream"
    _request: bytes
    _body: bytes
    _listener: Listener
    _bodiless: bool
    _resend: bool
    connection: "Connection | None" = None
    _fresh_only: bool = False
    paused: bool = False
    over: bool = False
    passage: asyncio.Protocol | None = None  # reads what only goes on, from one chunk's end on

    def cancel(self) -> None:
        if not self.over:
            connection = self.connection
            self._end()
            if connection is not None:
                connection.abort()

    def pause(self) -> None:
        """Stop reading, as the client takes no more for now."""
        self.paused = True
        if self.connection is not None:
            self.connection.transport.pause_reading()

    def resume(self) -> None:
        self.paused = False
        if self.connection is not None:
            self.connection.transport.resume_reading()

    # ---- for Upstream and Connection

    def start(self, connection: "Connection") -> None:
        self.connection, connection._sending, connection.spoken = connection, self, False
        connection.transport.write(self._request)
        if self._body:
            connection.transport.write(self._body)
        if self.paused:
            connection.transport.pause_reading()

    def answered(self, status: int, headers: list[Header]) -> None:
        if not self.over:
            self._listener.answered(status, headers)

    def received(self, body: bytes, complete: bool) -> None:
        if not self.over:
            (self._end() if complete else self._listener).received(body, complete)

    def broke(self, broken: Broken) -> None:
        if not self.over:
            self._end().broke(broken)

    def _end(self) -> Listener:
        """Return the listener, which is told one thing more at the most."""
        listener, self.over = self._listener, True
        self._upstream.sendings.pop(self, None)
        self.connection = self.passage = None
        del self._listener  # a cycle of references would wait for the collector
        return listener

    def lost(self, reason: str, connection: "Connection", *, silent: bool = False) -> None:
        """Note the end of the connection. A reused one may have ended before it carried anything: send again."""
        if self.over:
            return
        if self._resend and connection.reused and not connection.spoken and not self._fresh_only:
            self._fresh_only = True
            self.connection = None
            self._upstream.open(self)
        else:
            self.broke(Broken(reason, silent=silent))


class Upstream:
    def __init__(self, target: Target, connect_timeout_s: float = 2.0, tls: ssl.SSLContext | None = None) -> None:
        self.target = target
        self.path = target.path.encode()  # the prefix of each request's path
        self.reached_at = target.authority if target.is_address else ""  # its IP address, once it is known
        self.host_line = b"host: %b\r\n" % target.authority.encode()
        self.sendings: dict[Sending, None] = {}  # sorted by the time of sending
        self.spoken = False  # a byte has come since this was set to False
        self._connect_timeout_s = connect_timeout_s
        self._tls = tls
        self.idle: deque[Connection] = deque()  # the one used last at the right
        self.loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self.closed = False

    def send(
        self, request: bytes, listener: Listener, *, body: bytes = b"", bodiless: bool = False, resend: bool = True
    ) -> Sending:
        """Send a request. `body` follows it, if that is too large to be copied.

        `resend`: it may arrive twice, as it is sent again if a reused connection ends before a byte of the answer.
        """
        sending = Sending(self, request, body, listener, bodiless, resend)
        self.sendings[sending] = None
        while self.idle:
            if not resend and self.loop.time() - self.idle[-1].idle_since_s > SURE_IDLE_S:
                break  # the others have idled longer
            connection = self.idle.pop()
            if not connection.transport.is_closing():
                sending.start(connection)
                return sending
        self.open(sending)
        return sending

    def watch(self, listener: Listener) -> Sending:
        """Follow a request that a gateway sends to the replica; the caller tells the answer."""
        sending = Sending(self, b"", b"", listener, False, False)
        self.sendings[sending] = None
        return sending

    def open(self, sending: Sending) -> None:
        task = self.loop.create_task(self._open(sending))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, sending: Sending) -> None:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await self.loop.create_connection(
                    lambda: Connection(self),
                    self.target.host,
                    self.target.port,
                    ssl=self._tls,
                    server_hostname=self.target.host if self._tls else None,
                )
        except (OSError, UnicodeError) as error:  # UnicodeError: the host cannot be a name
            is_late, why = isinstance(error, TimeoutError), getattr(error, "strerror", None) or error
            reason = f"no connection within {self._connect_timeout_s:g} s" if is_late else f"no connection: {why}"
            silent, ours = is_late or is_one_of(error, NETWORK_FAULTS), is_one_of(error, SHORTAGES)
            # The request may have ended the replica if a connection had carried it before.
            sending.broke(Broken(reason, refused=not sending._fresh_only, silent=silent, ours=ours))
            return
        if sending.over or self.closed:
            connection.abort()
            return
        if (peer := connection.transport.get_extra_info("peername")) is not None:  # None: it has ended again
            host, port = peer[:2]
            self.reached_at = Target(host, port, tls=False, path="").authority
        sending.start(connection)

    def sweep(self, now_s: float) -> None:
        """Close connections that have idled for long; the oldest are at the left."""
        while self.idle and now_s - self.idle[0].idle_since_s > IDLE_LIMIT_S:
            self.idle.popleft().abort()

    def break_all(self, reason: str) -> None:
        """Fail all requests, as the replica was found dead or frozen."""
        for sending in list(self.sendings):
            connection = sending.connection
            sending.broke(Broken(reason))
            if connection is not None:
                connection.abort()
        self.drop_idle()

    def drop_idle(self) -> None:
        while self.idle:
            self.idle.popleft().abort()

    def close(self) -> None:
        self.closed = True
        for sending in list(self.sendings):
            sending.cancel()
        for task in self._opening:
            task.cancel()
        self.drop_idle()


class Connection(asyncio.Protocol):
    """One connection; carries one request at a time."""

    def __init__(self, upstream: Upstream) -> None:
        self.transport: asyncio.Transport
        self.idle_since_s = 0.0
        self.reused = False
        self.spoken = False  # a byte of the present answer has come
        self._upstream = upstream
        self._sending: Sending | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[Header] = []  # headers so far; trailers after the head are dropped
        self._head: list[Header] = []
        self._bodiless_bytes = 0  # read since the last part of a body: a head, chunk extensions or trailers
        self._pieces: list[bytes] = []
        self._status = 0
        self._told = False  # the sending has received the head
        self._head_complete = False
        self._complete = False
        self._keeps = True

    def abort(self) -> None:
        self._sending = None
        self.transport.set_protocol(self)  # nothing passes any more
        self.transport.abort()

    # ---- the transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        keep_alive(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        sending = self._sending
        if sending is None:  # nobody asked
            self.transport.abort()
            return
        self.spoken = self._upstream.spoken = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self._complete:
                self._fail(f"its answer is not HTTP ({error})")
                return
            self._keeps = False  # nobody asked for the bytes after the answer
        pieces = self._pieces
        self._bodiless_bytes = 0 if pieces or self._complete else self._bodiless_bytes + len(data)
        head_bytes = 0
        if not self._told and len(data) > MAX_HEAD_BYTES:  # the head may be most of one long read
            head_bytes = sum(len(name) + len(value) + 4 for name, value in self._head)
        if head_bytes > MAX_HEAD_BYTES or self._bodiless_bytes > MAX_HEAD_BYTES:
            part = "chunk extensions or trailers" if self._told else "headers"
            self._fail(f"the {part} of its answer are longer than {MAX_HEAD_BYTES:,} bytes")
            return
        if not self._head_complete:
            return
        if not self._told:
            self._told = True
            if not sending.over:  # here and below: what `Sending` has for others, without its call
                sending._listener.answered(self._status, self._head)
            if self._sending is not sending:  # it was cancelled
                return
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        if self._complete:
            self._done(sending)
            if not sending.over:
                sending._end().received(body, True)
        elif not sending.over:
            sending._listener.received(body, False)  # also without a body: the head alone is news
            if body and sending.passage is not None and data.endswith(b"%x\r\n%b\r\n" % (len(body), body)):
                self.transport.set_protocol(sending.passage)  # the parser need not know of chunks till the next one
            if len(data) > LONG_READ_BYTES and self._sending is sending and not sending.paused:
                self.transport.pause_reading()
                self._upstream.loop.call_soon(self._read_on, sending)

    def _read_on(self, sending: Sending) -> None:
        if self._sending is sending and not sending.paused:
            self.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self._upstream.idle:
            self._upstream.idle.remove(self)
        del self._parser  # it has us: a cycle of references would wait for the collector
        sending, self._sending = self._sending, None
        if sending is None:
            return
        is_framed = any(name in (b"content-length", b"transfer-encoding") for name, _ in self._head)
        if exc is None and self._head_complete and not self._keeps and not is_framed:
            sending.received(b"", True)  # the end of the connection is the end of the answer
        else:
            reason = f"it ended the connection ({exc})" if exc else "it ended the connection"
            sending.lost(reason, self, silent=is_one_of(exc, NETWORK_FAULTS))

    def _fail(self, reason: str) -> None:
        sending, self._sending = self._sending, None
        self.transport.abort()
        if sending is not None:
            sending.broke(Broken(reason))

    def _done(self, sending: Sending) -> None:
        """Free the connection for the next request, as the answer is complete."""
        keeps = self._keeps and not sending._bodiless
        if sending._body and self.transport.get_write_buffer_size():
            keeps = False  # it was refused early: the next request would wait for the rest of its body
        self._sending = None
        self.reused = True
        self._headers, self._head = [], []
        self._head_complete = self._complete = self._told = False
        self._bodiless_bytes = 0
        upstream = self._upstream
        if keeps and not upstream.closed and len(upstream.idle) < MAX_IDLE:
            self.idle_since_s = upstream.loop.time()
            upstream.idle.append(self)
        else:
            self.transport.abort()

    # ---- what the parser finds

    def on_message_begin(self) -> None:
        if self._complete:
            raise _Stop

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        headers, self._headers = self._headers, []
        if 100 <= status < 200:  # provisional: the answer proper follows
            return
        if not 200 <= status <= 599:
            raise _Stop(status)
        self._head, self._status, self._head_complete = headers, status, True
        self._keeps = self._parser.should_keep_alive()
        if self._sending is not None and self._sending._bodiless:
            self._complete = True

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self._complete = self._head_complete


def keep_alive(connected: socket.socket) -> None:
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if (option := getattr(socket, name, None)) is not None:
            connected.setsockopt(socket.IPPROTO_TCP, option, value)


class _Stop(Exception):
    """Makes the parser stop: the status is none that HTTP defines, or another answer follows."""
