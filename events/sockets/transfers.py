"""Replays and snapshots, sent to each peer as fast as it takes them.

A transfer costs little memory, however many peers ask and however slowly they read: it is a position in what is kept
anyway, all peers share the bytes of a message, and few messages wait in a peer's queue. A peer that takes nothing is
given up. Requests are read at a bounded rate, in turn from every peer; unread ones wait at their sender.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeAlias

import zmq

from events.native import SNAPSHOT_REQUEST
from events.sockets.peers import PublisherStats

log = logging.getLogger(__name__)

Socket: TypeAlias = zmq.Socket[bytes]
Message: TypeAlias = tuple[bytes | zmq.Frame, ...]  # the last part is a Frame
Peer: TypeAlias = tuple[Socket, bytes]  # and the identity that it gave to the connection

REQUESTS_PER_S = 100.0  # the limit for all peers; a reader asks once, and again some seconds later if nothing comes
MESSAGES_PER_S = 20_000.0  # the limit for all transfers
MESSAGES_PER_TURN = 64
WAITING_MESSAGES = 256  # the length of a peer's queue
STALLED_S = 30.0  # a peer whose queue stays full for this long is given up
RETRY_S = 0.005  # after a full queue; doubled while it stays full
RETRY_AT_MOST_S = 0.25
SNAPSHOT_SHARE = 0.1  # a share of the publisher's time
SNAPSHOTS_ALIVE = 2


class Rate:
    """A limit per second; the amount of one second may come at once."""

    def __init__(self, per_s: float, now_s: float) -> None:
        self._per_s = per_s
        self._left = per_s
        self._at_s = now_s

    def left(self, now_s: float) -> int:
        self._left = min(self._per_s, self._left + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        return int(self._left)

    def take(self, count: int = 1) -> None:
        self._left -= count

    def wait_s(self, count: int = 1) -> float:
        """Seconds until `count` of them are allowed."""
        return max(0.0, (count - self._left) / self._per_s)


class Transfer:
    """The rest of one peer's replay or snapshot."""

    __slots__ = ("due_s", "messages", "moved_s", "next", "retry_s", "snapshot")

    def __init__(self, messages: Iterator[Message], now_s: float, snapshot: int = 0) -> None:
        self.messages = messages
        self.next = next(messages, None)
        self.snapshot = snapshot  # its number; 0: it is a replay
        self.moved_s = self.due_s = now_s
        self.retry_s = RETRY_S

    def moved(self, now_s: float) -> None:
        self.next = next(self.messages, None)
        self.moved_s, self.retry_s = now_s, RETRY_S

    def wait(self, now_s: float) -> None:
        self.due_s = now_s + self.retry_s
        self.retry_s = min(2 * self.retry_s, RETRY_AT_MOST_S)


class Transfers:
    """Open requests, and each peer's transfer in progress. Time is an argument; no socket is owned."""

    def __init__(
        self,
        replays: Socket | None,
        replay: Callable[[bytes], Iterator[Message]],
        snapshots: Socket | None,
        snapshot: Callable[[], list[Message]],
        clock: Callable[[], float],
        stats: PublisherStats,
    ) -> None:
        """`replay` answers one request; `snapshot` makes one snapshot for all waiting peers."""
        self.stats = stats
        self._replays = replays
        self._replay = replay
        self._snapshots = snapshots
        self._snapshot = snapshot
        self._clock = clock
        self._requests: dict[Peer, bytes] = {}  # the newest of each peer
        self._transfers: dict[Peer, Transfer] = {}
        self._turns: deque[Peer] = deque()  # the same peers, in the order in which they are served
        self._request_rate = Rate(REQUESTS_PER_S, clock())
        self._message_rate = Rate(MESSAGES_PER_S, clock())
        self._snapshot_after_s = clock()
        self._told = False

    @property
    def may_receive(self) -> bool:
        return self._request_rate.left(self._clock()) > 0

    def receive(self, socket: Socket) -> None:
        for _ in range(self._request_rate.left(self._clock())):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._request_rate.take()
            if len(frames) != 3 or frames[1] != b"":
                continue
            if len(frames[2]) <= 8 if socket is self._replays else frames[2] == SNAPSHOT_REQUEST:
                self._requests[socket, frames[0]] = frames[2]

    def wait_s(self) -> float | None:
        """Until something is to be done without a new request; None: nothing is under way."""
        now_s = self._clock()
        waits = [transfer.due_s - now_s for transfer in self._transfers.values()]
        if waits and not self._message_rate.left(now_s):
            waits = [self._message_rate.wait_s(MESSAGES_PER_TURN)]
        for peer in self._requests:
            if peer not in self._transfers:
                waits.append(self._snapshot_after_s - now_s if peer[0] is self._snapshots else 0.0)
        if not self.may_receive:
            waits.append(self._request_rate.wait_s())
        return max(0.0, min(waits)) if waits else None

    def turn(self) -> None:
        """Start pending transfers, and send some messages of one; events continue in between."""
        now_s = self._clock()
        self._begin(now_s)
        for _ in range(len(self._turns)):
            peer = self._turns.popleft()
            transfer = self._transfers[peer]
            if transfer.due_s > now_s:
                self._turns.append(peer)
                continue
            if self._send(peer, transfer, now_s):
                self._turns.append(peer)
            else:
                del self._transfers[peer]
            return

    def _begin(self, now_s: float) -> None:
        waiting = [peer for peer in self._requests if peer not in self._transfers]
        for peer in waiting:
            if peer[0] is self._replays:
                self.stats.replays += 1
                self._add(peer, Transfer(self._replay(self._requests.pop(peer)), now_s))
        snapshots = [peer for peer in waiting if peer[0] is self._snapshots]
        if snapshots and now_s >= self._snapshot_after_s:
            began_s = self._clock()
            messages = self._snapshot()
            now_s = self._clock()
            self._snapshot_after_s = now_s + (now_s - began_s) / SNAPSHOT_SHARE
            self.stats.snapshots += 1
            oldest = self.stats.snapshots - SNAPSHOTS_ALIVE
            for peer in [peer for peer, transfer in self._transfers.items() if 0 < transfer.snapshot <= oldest]:
                self._transfers[peer].next = None
                self._abandoned()
            for peer in snapshots:
                del self._requests[peer]
                self._add(peer, Transfer(iter(messages), now_s, self.stats.snapshots))

    def _add(self, peer: Peer, transfer: Transfer) -> None:
        self._transfers[peer] = transfer
        self._turns.append(peer)

    def _send(self, peer: Peer, transfer: Transfer, now_s: float) -> bool:
        """False: the transfer has ended, or its peer is gone or given up."""
        socket, identity = peer
        for _ in range(min(MESSAGES_PER_TURN, self._message_rate.left(now_s))):
            message = transfer.next
            if message is None:
                return False
            try:
                socket.send(identity, zmq.SNDMORE | zmq.NOBLOCK)  # it alone decides whether the queue has room
                for part in (b"", *message[:-1]):
                    socket.send(part, zmq.SNDMORE | zmq.NOBLOCK)
                socket.send(message[-1], zmq.NOBLOCK, copy=False)
            except zmq.Again:
                transfer.wait(now_s)
                if now_s - transfer.moved_s < STALLED_S:
                    return True
                self._abandoned()
                return False
            except zmq.ZMQError:  # the peer is gone
                return False
            self._message_rate.take()
            transfer.moved(now_s)
        return transfer.next is not None

    def _abandoned(self) -> None:
        self.stats.abandoned_transfers += 1
        if not self._told:
            self._told = True
            log.warning("a peer does not read its replay or snapshot; dropping the rest, it may ask again")
