"""Pulls blocks from neighbours. Nothing that a peer does raises; it costs a pull its deadline and one buffer."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec
from xxhash import xxh3_128_digest

from replica.cache.chain import Chain
from replica.cache.moves import GiveWay, Pull
from replica.neighbours.connection import Connection, Counts, NeighbourConfig, Patience, host_and_port
from replica.neighbours.messages import (
    LEASE_S,
    MAX_ANSWER_BYTES,
    Block,
    Lost,
    Offer,
    Prefixes,
    Read,
    Welcome,
    decode_from_source,
)
from replica.neighbours.sealed import CHALLENGE_BYTES, NotProven, reply_to
from replica.runners.runner import BlockMemory

log = logging.getLogger(__name__)

Answer = TypeVar("Answer", Welcome, Offer, Block, Prefixes)
Came = TypeVar("Came")

CONNECT_S = 0.5
HANDSHAKE_S = 1.0
DEAD_S = 5.0  # a peer that failed is not asked again for this long
# Below this no pull pauses: a new connection alone may take that long on a busy machine.
HURRY_S = 1.0
KEPT_S = 30.0  # a connection without a pull; the source keeps it longer
MAX_KEPT = 16  # connections and dead peers: a fleet is larger, but its prefixes have few sources at a time
MAX_LOGGED = 1024

FULL = ("", "busy")  # reasons of an offer that say nothing bad of the source


def read_of(pull: Pull, config: NeighbourConfig, patience_s: float) -> Read:
    chain = pull.chain
    return Read(
        model=config.model,
        prompt=chain.tokens[: pull.stop * chain.block_size].tobytes(),
        start=pull.start,
        stop=pull.stop,
        kv_layout=config.kv_layout,
        lora_name=chain.lora_name,
        cache_salt=chain.cache_salt,
        extras={index: list(own) for index, own in chain.extras.items() if index < pull.stop},
        patience_s=patience_s,
        lora_digest=chain.lora_digest,
    )


def check_header(pull: Pull, header: Block, came: int, block_bytes: int) -> None:
    """Check what can be known before the payload is read. Lost says what is wrong, and then none may follow."""
    expected = pull.start + came
    if header.index != expected:
        raise Lost("order", f"block {header.index} came and {expected} was due")
    if header.size != block_bytes:
        raise Lost("size", f"block {header.index} has {header.size} bytes; this layout has {block_bytes}")
    if header.tokens != pull.chain.tokens_of(expected):
        raise Lost("tokens", f"block {header.index} has other tokens")
    if header.exact != pull.chain.exact.get(expected):
        raise Lost("tokens", f"block {header.index} has other extra keys")


class Kept(NamedTuple):
    """A connection between two pulls."""

    connection: Connection
    since_s: float


class Reader:
    """Keeps connections, and remembers dead peers. One thread pulls; any may stop it, and read the counts."""

    def __init__(self, config: NeighbourConfig, memory: BlockMemory) -> None:
        self.config = config
        self.counts = Counts()
        self._memory = memory
        self._buffer = memoryview(bytearray(memory.block_bytes))
        self._kept: dict[str, Kept] = {}  # the longest unused first
        self._dead_until_s: dict[str, float] = {}
        self._logged: set[tuple[str, str]] = set()
        self._stopped = threading.Event()

    def pull(self, pull: Pull, give_way: GiveWay = lambda *_: None) -> int:
        """Write the blocks into the pool's; return how many leading ones came and were verified.

        Those beyond the number returned may have been written, too. After each block but the last, `give_way` gets the
        processor time that it took this thread, and how long it may pause: all pauses together take at most half of
        the time that is left, and none of its last HURRY_S.
        """
        return sum(1 for _ in self._exchange(pull, partial(self._blocks, pull, give_way)))

    def hottest(self, endpoint: str, most_blocks: int, patience_s: float) -> list[Read]:
        """Return what to pull from a neighbour before anybody asks for its like here; nothing if it cannot say."""
        pull = Pull(endpoint, Chain((), self.config.block_size, ""), 0, range(most_blocks), patience_s)

        def prefixes(connection: Connection, patience: Patience) -> Iterator[Read]:
            connection.send_frame(read_of(pull, self.config, patience_s), patience)
            yield from _receive(connection, Prefixes, patience.without_stall()).reads

        return list(self._exchange(pull, prefixes))

    def _exchange(self, pull: Pull, talk: Callable[[Connection, Patience], Iterator[Came]]) -> Iterator[Came]:
        """Yield what comes over a connection, until the end or a failure."""
        began_s, endpoint = time.monotonic(), pull.endpoint
        if began_s < self._dead_until_s.get(endpoint, 0.0):
            self.counts.fail("dead")
            return
        patience = Patience(began_s + min(pull.patience_s, LEASE_S), self._stopped, self.config.stall_s)
        came, connection = 0, None
        try:
            connection = self._take(endpoint) or self._connect(endpoint, patience)
            for one in talk(connection, patience):
                came += 1
                yield one
            self._kept[endpoint] = Kept(connection, time.monotonic())
            if len(self._kept) > MAX_KEPT:
                self._kept.pop(next(iter(self._kept))).connection.close()
        except Lost as lost:
            if connection is not None:
                connection.close()
            self.counts.fail(lost.reason)
            is_its_fault = lost.reason != "cancelled" and not (lost.reason == "deadline" and came)
            if is_its_fault:  # it is left alone for a while
                self._dead_until_s.pop(endpoint, None)
                self._dead_until_s[endpoint] = time.monotonic() + DEAD_S
                if len(self._dead_until_s) > MAX_KEPT:
                    del self._dead_until_s[next(iter(self._dead_until_s))]
                if (endpoint, lost.reason) not in self._logged and len(self._logged) < MAX_LOGGED:
                    self._logged.add((endpoint, lost.reason))
                    log.warning("blocks cannot be read from %s (%s): %s", endpoint, lost.reason, lost)
        finally:
            self.counts.took(time.monotonic() - began_s)

    def stop(self) -> None:
        """End the pull that is under way, and all later ones."""
        self._stopped.set()

    def close(self) -> None:
        for kept in self._kept.values():
            kept.connection.close()
        self._kept.clear()

    # ---- one pull

    def _blocks(self, pull: Pull, give_way: GiveWay, connection: Connection, patience: Patience) -> Iterator[None]:
        """Yield after each block that came and is right."""
        left_s = max(0.0, min(patience.until_s - time.monotonic(), 3600.0))
        connection.send_frame(read_of(pull, self.config, left_s), patience)
        # An engine answers between two steps, which may take longer than a stall.
        offer = _receive(connection, Offer, patience.without_stall())
        if offer.blocks > len(pull.blocks):
            raise Lost("protocol", f"{offer.blocks} blocks are offered and {len(pull.blocks)} were asked for")
        if offer.reason not in FULL:
            raise Lost("refused", f"it answers: {offer.reason}")
        for number in range(offer.blocks):
            began_s = time.thread_time()
            header = _receive(connection, Block, patience)
            check_header(pull, header, number, self._memory.block_bytes)
            connection.receive_into(self._buffer, patience)
            if xxh3_128_digest(self._buffer) != header.checksum:
                raise Lost("checksum", f"the payload of block {header.index} is damaged")
            self._memory.write([pull.blocks[number]], [self._buffer])
            self.counts.add(len(self._buffer))
            yield
            left = len(pull.blocks) - number - 1
            if left:
                most_s = max(0.0, patience.until_s - time.monotonic() - HURRY_S) / left / 2
                give_way(time.thread_time() - began_s, most_s)

    def _connect(self, endpoint: str, patience: Patience) -> Connection:
        try:
            address = host_and_port(endpoint)
            left_s = patience.until_s - time.monotonic()
            connected = socket.create_connection(address, timeout=max(0.001, min(CONNECT_S, left_s)))
        except (OSError, ValueError) as error:
            raise Lost("unreachable", str(error)) from error
        connection = Connection(connected)
        try:
            brief = patience.within(HANDSHAKE_S)
            reply, session = reply_to(self.config.secret, connection.receive(CHALLENGE_BYTES, brief))
            connection.send(brief, reply)
            connection.session = session
            _receive(connection, Welcome, brief)
        except NotProven as error:
            connection.close()
            raise Lost("proof", str(error)) from error
        except Lost as lost:
            connection.close()
            if lost.reason == "closed":
                raise Lost("handshake", "it closes the connection, as a replica with another secret does") from lost
            raise
        log.info("blocks are read from %s", endpoint)
        return connection

    # ---- between pulls

    def _take(self, endpoint: str) -> Connection | None:
        """Return a kept connection, unless its peer has closed it or has said what nobody asked for."""
        kept = self._kept.pop(endpoint, None)
        if kept is None:
            return None
        if kept.connection.is_quiet and time.monotonic() - kept.since_s < KEPT_S:
            return kept.connection
        kept.connection.close()
        return None


def _receive(connection: Connection, kind: type[Answer], patience: Patience) -> Answer:
    body = connection.receive_frame(MAX_ANSWER_BYTES, patience)
    try:
        message = decode_from_source(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Lost("protocol", f"an answer cannot be read: {error}") from error
    if not isinstance(message, kind):
        raise Lost("protocol", f"a {type(message).__name__} came instead of a {kind.__name__}")
    return message
