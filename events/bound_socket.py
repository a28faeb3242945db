"""A publisher's bound socket: what its peers may cost, and a fresh start where they cost more."""

import errno
import logging

import zmq

from events.curve import CurveKeys, secure_server
from events.peers import Peers
from events.publisher_stats import PublisherStats

log = logging.getLogger(__name__)

MOST_PART_BYTES = 1024  # of what a peer sends: a request, a subscription, a handshake
MOST_TOPICS = 1000  # of all peers; libzmq takes some 40 bytes for each byte of a topic
WAITING_REQUESTS = 4  # of one peer; more wait with it (with 1, nobody gets in by CURVE)
KERNEL_BYTES = 256 * 1024  # wait in the kernel for a peer that does not read
UNREAD_MS = 30_000  # a peer whose kernel takes nothing for so long is gone
HANDSHAKE_MS = 5000


class BoundSocket:
    """A PUB or a ROUTER. `socket` is another one after `inspect` has found too many topics."""

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
        self._context = context
        self._kind = kind
        self._waiting_messages = waiting_messages
        self._most_peers = most_peers
        self._curve = curve
        self._stats = stats
        self.endpoint = endpoint
        self._open()
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise zmq.ZMQError(error.errno, f"cannot bind {endpoint}: {zmq.strerror(error.errno or 0)}") from error
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._bound = True

    def _open(self) -> None:
        self.socket: zmq.Socket[bytes] = self._context.socket(self._kind)
        self.peers = Peers(self.socket, self._most_peers, self._stats)
        self.socket.sndhwm = self._waiting_messages
        self.socket.rcvhwm = WAITING_REQUESTS
        self.socket.maxmsgsize = MOST_PART_BYTES
        self.socket.handshake_ivl = HANDSHAKE_MS
        self.socket.tcp_maxrt = UNREAD_MS
        self.socket.sndbuf = KERNEL_BYTES
        # The kernel asks whether a peer is there, not ZeroMQ: libzmq 4.3.5 aborts the process when a heartbeat is due
        # on a connection that broke while nobody read from it, and some consumers' libraries do not know a PING.
        self.socket.tcp_keepalive = 1
        self.socket.tcp_keepalive_idle, self.socket.tcp_keepalive_intvl, self.socket.tcp_keepalive_cnt = 10, 5, 3
        self.socket.linger = 500
        if self._kind == zmq.ROUTER:
            self.socket.router_mandatory = True
        if self._curve is not None:
            secure_server(self.socket, self._curve)

    def inspect(self) -> bool:
        """Shut out peers that send too much, forget all if they subscribe to too much; True: inspect again soon."""
        self.peers.inspect()
        if not self._bound:
            self._bind_again()
        elif self._kind == zmq.PUB and int(self.socket.getsockopt(zmq.TOPICS_COUNT)) > MOST_TOPICS:
            if not self._stats.reopened_sockets:
                log.warning("more than %d topics at %s; reopening the socket", MOST_TOPICS, self.endpoint)
            self._stats.reopened_sockets += 1
            self.close(linger_ms=0)
            self._open()
            self._bind_again()
        return not self._bound

    def _bind_again(self) -> None:
        """Bind the endpoint again; messages sent before are lost, which a consumer sees as a gap."""
        try:
            self.socket.bind(self.endpoint)
            self._bound = True
        except zmq.ZMQError as error:
            if error.errno != errno.EADDRINUSE:  # the old socket is closed by another thread
                raise
            self._bound = False

    def close(self, linger_ms: int | None = None) -> None:
        self.peers.close()  # first: libzmq waits for ever to report to a monitor that nobody reads any more
        self.socket.close(linger_ms)
