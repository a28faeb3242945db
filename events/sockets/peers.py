"""A bound socket and its connections: how many there may be, and how much they may send.

libzmq bounds neither: it accepts as long as there are descriptors, and keeps a message that never ends part by part; an
empty part, two bytes on its way, takes 64. Its monitor names the descriptor of each connection; the kernel says when
something came by it and how much, and can shut it down, which libzmq takes for a peer that has left.
"""

import logging
import os
import select
import socket as network
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import zmq
from msgspec import Struct
from zmq.utils.monitor import parse_monitor_message

from events.sockets.curve import CurveKeys, secure_server

log = logging.getLogger(__name__)

# All peers together may have sent this much by the connections they have: subscriptions, requests of some ten bytes,
# handshakes and heartbeats. No more can wait, as nobody knows which parts are of messages that have ended, and libzmq
# takes some 40 bytes for each byte of a topic.
MAX_BYTES = 2**20
INSPECT_S = 0.01  # between two looks at what comes; libzmq takes some ten megabytes meanwhile
_BYTES_RECEIVED = slice(128, 136)  # tcpi_bytes_received of Linux's `struct tcp_info`
_TCP_INFO = getattr(network, "TCP_INFO", None)


class PublisherStats(Struct):
    batches: int = 0
    events: int = 0
    payload_bytes: int = 0
    unencodable_events: int = 0
    replays: int = 0
    snapshots: int = 0
    abandoned_transfers: int = 0  # to peers that did not read them
    refused_peers: int = 0  # there were too many
    cut_off_peers: int = 0  # they sent too much


class PeerConnection(Struct):
    ends: tuple[
        object, object
    ]  # its addresses: the kernel may give its descriptor to another one, also of this process
    received: int  # bytes; 0 where the kernel does not say

    @property
    def host(self) -> object:
        peer = self.ends[1]
        return peer[0] if isinstance(peer, tuple) else ""


class Peers:
    """Watches a socket, from before it is bound.

    Call `watch` when `monitor` has something, and `inspect` after `arrivals` has something: at once, or up to INSPECT_S
    after the last time.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", most_peers: int, stats: PublisherStats) -> None:
        if sys.platform == "linux":
            self.arrivals = select.epoll()
        else:  # nothing tells how much has come, so it awaits nothing
            self.arrivals = select.kqueue()
        self._socket = socket
        self._most_peers = most_peers
        self._stats = stats
        self._connections: dict[int, PeerConnection] = {}  # connections by descriptor, the oldest first
        self.monitor: zmq.Socket[bytes] = socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)

    def __len__(self) -> int:
        return len(self._connections)

    def close(self) -> None:
        if not self.monitor.closed:
            self._socket.disable_monitor()
            self.monitor.close()
            self.arrivals.close()

    def watch(self) -> None:
        """Track connects and disconnects; close connections beyond the limit."""
        came: dict[int, None] = {}  # the last that is known of each descriptor; in order
        with suppress(zmq.Again):
            while True:
                event = parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))
                descriptor = int(event["value"])
                self._connections.pop(descriptor, None)
                came.pop(descriptor, None)
                if event["event"] == zmq.EVENT_ACCEPTED:
                    came[descriptor] = None
        endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        for descriptor in came:
            if (connection := connection_at(descriptor)) is None:
                continue
            own = connection.ends[0]
            if not (endpoint.endswith(f":{own[1]}") if isinstance(own, tuple) else endpoint.startswith("ipc:")):
                continue  # the descriptor belongs to another connection by now
            self._connections[descriptor] = connection
            self._await_more(descriptor)
            if len(self._connections) > self._most_peers:  # refuse the newest of the host that has the most
                [(crowd, _)] = Counter(each.host for each in self._connections.values()).most_common(1)
                newest = next(at for at in reversed(self._connections) if self._connections[at].host == crowd)
                if not self._stats.refused_peers:
                    log.warning("more than %d peers at one event socket; refusing one from %r", self._most_peers, crowd)
                self._stats.refused_peers += 1
                self._shut(newest)

    def inspect(self) -> None:
        """Count what came; beyond the limit, close the connection that has sent most of the host that has."""
        for descriptor, _ in self.arrivals.poll(0) if sys.platform == "linux" else ():
            if (connection := self._connections.get(descriptor)) is not None:
                now = connection_at(descriptor)
                connection.received = now.received if now is not None and now.ends == connection.ends else 0
                self._await_more(descriptor)
        while sum(each.received for each in self._connections.values()) > MAX_BYTES:
            by_host: Counter[object] = Counter()
            for each in self._connections.values():
                by_host[each.host] += each.received
            [(host, _)] = by_host.most_common(1)
            worst = max(
                (at for at, each in self._connections.items() if each.host == host),
                key=lambda at: self._connections[at].received,
            )
            if not self._stats.cut_off_peers:
                log.warning("a peer of an event socket at %r sends without end; closing it", host)
            self._stats.cut_off_peers += 1
            self._shut(worst)

    def _await_more(self, descriptor: int) -> None:
        if sys.platform != "linux":
            return
        with suppress(OSError):  # it is closed
            try:
                self.arrivals.modify(descriptor, select.EPOLLIN | select.EPOLLONESHOT)
            except FileNotFoundError:
                self.arrivals.register(descriptor, select.EPOLLIN | select.EPOLLONESHOT)

    def _shut(self, descriptor: int) -> None:
        connection = self._connections.pop(descriptor)
        with suppress(OSError), _borrowed(descriptor) as borrowed:  # it may be gone already
            if (borrowed.getsockname(), borrowed.getpeername()) == connection.ends:
                borrowed.shutdown(network.SHUT_RDWR)


@contextmanager
def _borrowed(descriptor: int) -> Iterator[network.socket]:
    """A copy of a descriptor of libzmq's, which may be closed meanwhile: OSError, or another connection."""
    copy = os.dup(descriptor)
    try:
        borrowed = network.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with borrowed:
        yield borrowed


def connection_at(descriptor: int) -> PeerConnection | None:
    """Return the connection that has this descriptor now; None if there is none."""
    try:
        with _borrowed(descriptor) as borrowed:
            received = 0
            if _TCP_INFO is not None and borrowed.family != network.AF_UNIX:
                info = borrowed.getsockopt(network.IPPROTO_TCP, _TCP_INFO, _BYTES_RECEIVED.stop)
                received = int.from_bytes(info[_BYTES_RECEIVED], "little")
            return PeerConnection((borrowed.getsockname(), borrowed.getpeername()), received)
    except OSError:
        return None


MAX_PART_BYTES = 1024  # the longest message of a peer: a request, a subscription, a handshake
WAITING_REQUESTS = 4  # the limit for one peer; more wait with it (with 1, nobody gets in by CURVE)
KERNEL_BYTES = 256 * 1024  # wait in the kernel for a peer that does not read
UNREAD_MS = 30_000  # a peer whose kernel takes nothing for this long is gone
HANDSHAKE_MS = 5000


def bind(socket: "zmq.Socket[bytes]", endpoint: str) -> str:
    """Return the endpoint that was bound: port 0 takes a free one."""
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise zmq.ZMQError(error.errno, f"cannot bind {endpoint}: {zmq.strerror(error.errno or 0)}") from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


class BoundSocket:
    """A PUB or a ROUTER, with what its peers may cost."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        kind: int,
        endpoint: str,
        *,
        waiting_messages: int,
        most_peers: int,
        curve: CurveKeys | None,
        stats: PublisherStats,
    ) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(kind)
        self.peers = Peers(self.socket, most_peers, stats)
        self.socket.sndhwm = waiting_messages
        self.socket.rcvhwm = WAITING_REQUESTS
        self.socket.maxmsgsize = MAX_PART_BYTES
        self.socket.handshake_ivl = HANDSHAKE_MS
        self.socket.tcp_maxrt = UNREAD_MS
        self.socket.sndbuf = KERNEL_BYTES
        # The kernel asks whether a peer is there, not ZeroMQ: libzmq 4.3.5 aborts the process when a heartbeat is due
        # on a connection that broke while nobody read from it, and some consumers' libraries do not know a PING.
        self.socket.tcp_keepalive = 1
        self.socket.tcp_keepalive_idle, self.socket.tcp_keepalive_intvl, self.socket.tcp_keepalive_cnt = 10, 5, 3
        self.socket.linger = 500
        if kind == zmq.ROUTER:
            self.socket.router_mandatory = True
        if curve is not None:
            secure_server(self.socket, curve)
        try:
            self.endpoint = bind(self.socket, endpoint)
        except zmq.ZMQError:
            self.close()
            raise

    def close(self, linger_ms: int | None = None) -> None:
        self.peers.close()  # first: libzmq waits for ever to report to a monitor that nobody reads any more
        self.socket.close(linger_ms)
