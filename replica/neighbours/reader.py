"""Pulls blocks from neighbours. Nothing that a peer does raises; it costs a pull its deadline and one buffer."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec
from msgspec import Struct

from replica.neighbours.connection import STALL_S, Connection, Counts, Patience, host_and_port
from replica.neighbours.messages import (
    LEASE_S,
    MAX_ANSWER_BYTES,
    Block,
    Lost,
    Offer,
    Welcome,
    decode_from_source,
)
from replica.neighbours.sealed import CHALLENGE_BYTES, NotProven, Session, reply_to
from replica.neighbours.transports import Inlet, ReaderTransport
from replica.neighbours.wanted import Arrivals, Wanted
from replica.runners.block_memory import BlockMemory

log = logging.getLogger(__name__)

Answer = TypeVar("Answer", Welcome, Offer, Block)

CONNECT_S = 0.5
HANDSHAKE_S = 1.0
DEAD_S = 5.0  # a peer that failed is not asked again for so long
# Below this no pull pauses: a new connection alone may take that long on a busy machine.
HURRY_S = 1.0
KEPT_S = 30.0  # a connection without a pull; the source keeps it longer
MAX_KEPT = 16  # connections and dead peers: a fleet is larger, but its prefixes have few sources at a time
MAX_LOGGED = 1024

FULL = ("", "busy")  # reasons of an offer that say nothing bad of the source


class ReaderConfig(Struct, frozen=True, kw_only=True):
    """The names and the secret that a reader shows to a source."""

    secret: bytes
    model: str
    kv_layout: str
    stall_s: float = STALL_S


class Kept(Struct):
    """A connection between two pulls."""

    connection: Connection
    inlet: Inlet
    since_s: float

    def close(self) -> None:
        self.inlet.close()
        self.connection.close()


class Reader:
    """Keeps connections, and remembers dead peers. One thread pulls; any may cancel a pull, and read the counts."""

    def __init__(self, config: ReaderConfig, memory: BlockMemory, transports: Mapping[str, ReaderTransport]) -> None:
        self.counts = Counts()
        self._config = config
        self._memory = memory
        self._transports = transports
        self._kept: dict[str, Kept] = {}  # the longest unused first
        self._dead_until_s: dict[str, float] = {}
        self._logged: set[tuple[str, str]] = set()

    def pull(
        self,
        endpoint: str,
        wanted: Wanted,
        targets: Sequence[int],
        deadline_s: float,
        cancelled: threading.Event | None = None,
        give_way: Callable[[float, float], None] = lambda *_: None,
    ) -> int:
        """Write the wanted blocks into the targets; return how many leading ones came and were verified.

        The deadline is a time of `time.monotonic`. Targets beyond the number returned may have been written, too.
        After each block but the last, `give_way` gets the processor time that it took this thread, and how long it may
        pause: all pauses together take at most half of the time that is left, and none of its last HURRY_S.
        """
        assert len(targets) == wanted.count, f"{len(targets)} targets for {wanted.count} blocks"
        if time.monotonic() < self._dead_until_s.get(endpoint, 0.0):
            self.counts.fail("dead")
            return 0
        began_s = time.monotonic()
        arrivals = Arrivals(wanted, self._memory.block_bytes)
        patience = Patience(min(deadline_s, began_s + LEASE_S), cancelled, self._config.stall_s)
        kept: Kept | None = None
        try:
            kept = self._take(endpoint) or self._connect(endpoint, patience)
            self._exchange(kept, wanted, targets, arrivals, patience, give_way)
            kept.since_s = time.monotonic()
            self._kept[endpoint] = kept
            if len(self._kept) > MAX_KEPT:
                self._kept.pop(next(iter(self._kept))).close()
        except Lost as lost:
            if kept is not None:
                kept.close()
            self._note(endpoint, lost, arrivals.count)
        finally:
            self.counts.took(time.monotonic() - began_s)
        return arrivals.count

    def close(self) -> None:
        for kept in self._kept.values():
            kept.close()
        self._kept.clear()
        for transport in self._transports.values():
            transport.close()

    # ---- one pull

    def _exchange(
        self,
        kept: Kept,
        wanted: Wanted,
        targets: Sequence[int],
        arrivals: Arrivals,
        patience: Patience,
        give_way: Callable[[float, float], None],
    ) -> None:
        connection, config = kept.connection, self._config
        left_s = max(0.0, min(patience.until_s - time.monotonic(), 3600.0))
        request = wanted.request(config.model, config.kv_layout, kept.inlet.name, left_s)
        connection.send_frame(request, patience)
        # An engine answers between two steps, which may take longer than a stall.
        offer = _receive(connection, Offer, patience.without_stall())
        arrivals.offer(offer)
        if offer.reason not in FULL:
            raise Lost("refused", f"it answers: {offer.reason}")
        while not arrivals.is_complete:
            began_s = time.thread_time()
            header = _receive(connection, Block, patience)
            arrivals.check_header(header)
            payload = kept.inlet.receive(header, patience)
            target = targets[arrivals.count]
            arrivals.check_payload(header, payload)
            self._memory.write([target], [payload])
            self.counts.add(len(payload))
            left = wanted.count - arrivals.count
            if left:
                most_s = max(0.0, patience.until_s - time.monotonic() - HURRY_S) / left / 2
                give_way(time.thread_time() - began_s, most_s)

    def _connect(self, endpoint: str, patience: Patience) -> Kept:
        try:
            address = host_and_port(endpoint)
            left_s = patience.until_s - time.monotonic()
            connected = socket.create_connection(address, timeout=max(0.001, min(CONNECT_S, left_s)))
        except (OSError, ValueError) as error:
            raise Lost("unreachable", str(error)) from error
        connection = Connection(connected)
        try:
            brief = patience.within(HANDSHAKE_S)
            reply, session = reply_to(self._config.secret, connection.receive(CHALLENGE_BYTES, brief))
            connection.send(brief, reply)
            connection.session = session
            inlet = self._inlet(connection, session, _receive(connection, Welcome, brief))
        except NotProven as error:
            connection.close()
            raise Lost("proof", str(error)) from error
        except Lost as lost:
            connection.close()
            if lost.reason == "closed":
                raise Lost("handshake", "it closes the connection, as a replica with another secret does") from lost
            raise
        log.info("blocks are read from %s by %s", endpoint, inlet.name)
        return Kept(connection, inlet, time.monotonic())

    def _inlet(self, connection: Connection, session: Session, welcome: Welcome) -> Inlet:
        """Return the reader's end of the best transport that both have, and that works."""
        for name, hidden in welcome.transports.items():
            if (own := self._transports.get(name)) is not None:
                inlet = own.inlet(connection, session.hide(hidden))
                if inlet is not None:
                    return inlet
        raise Lost("refused", f"it has no transport in common, but {', '.join(welcome.transports)}")

    # ---- between pulls

    def _take(self, endpoint: str) -> Kept | None:
        """Return a kept connection, unless its peer has closed it or has said what nobody asked for."""
        kept = self._kept.pop(endpoint, None)
        if kept is None or (kept.connection.is_quiet and time.monotonic() - kept.since_s < KEPT_S):
            return kept
        kept.close()
        return None

    def _note(self, endpoint: str, lost: Lost, blocks: int) -> None:
        """Count the end of a pull; leave the peer alone for a while, and log it once for each peer and reason."""
        self.counts.fail(lost.reason)
        if lost.reason == "cancelled" or (lost.reason == "deadline" and blocks):
            return  # the peer has done nothing wrong
        self._dead_until_s.pop(endpoint, None)
        self._dead_until_s[endpoint] = time.monotonic() + DEAD_S
        if len(self._dead_until_s) > MAX_KEPT:
            del self._dead_until_s[next(iter(self._dead_until_s))]
        if (endpoint, lost.reason) not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add((endpoint, lost.reason))
            log.warning("blocks cannot be read from %s (%s): %s", endpoint, lost.reason, lost)


def _receive(connection: Connection, kind: type[Answer], patience: Patience) -> Answer:
    body = connection.receive_frame(MAX_ANSWER_BYTES, patience)
    try:
        message = decode_from_source(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Lost("protocol", f"an answer cannot be read: {error}") from error
    if not isinstance(message, kind):
        raise Lost("protocol", f"a {type(message).__name__} came instead of a {kind.__name__}")
    return message
