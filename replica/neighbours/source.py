"""The server of a replica whose blocks neighbours read. Every peer's cost is bounded in memory, threads and time.

A connection has a thread, and a reader gets one stream at a time. A stream holds blocks only while it runs, which the
lease bounds; a reader that takes no byte for `stall_s` loses it sooner. There are a few streams, so others wait for
their turn, and the buffers of these are all the payloads in flight.
"""

import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import msgspec
from xxhash import xxh3_128_digest

from events.blocks import TOKEN_BYTES
from replica.cache.chain import Chain
from replica.cache.moves import Pull
from replica.neighbours.connection import Connection, Counts, NeighbourConfig, Patience, host_and_port
from replica.neighbours.holds import Holds
from replica.neighbours.messages import MAX_READ_BYTES, Block, Lost, Offer, Prefixes, Read, Welcome, decode_read
from replica.neighbours.reader import read_of
from replica.neighbours.sealed import REPLY_BYTES, Challenge, NotProven

log = logging.getLogger(__name__)

IDLE_S = 60.0  # a connection without a request
HOLD_S = 3.0  # how long a reader that has its turn waits for the engine, which may be in a step
NICENESS = 5  # the threads' niceness: the engine's own come first


class StoredBlocks(Protocol):
    """The bytes of blocks that are held; any thread may read them."""

    @property
    def block_bytes(self) -> int: ...

    def read(self, blocks: Sequence[int], into: Sequence[memoryview]) -> None:
        """Copy the block's bytes, all layers, to a buffer of `block_bytes`."""


class Source:
    """Serves until it is closed. Raises OSError if it cannot listen at the endpoint."""

    def __init__(self, config: NeighbourConfig, endpoint: str, holds: Holds, memory: StoredBlocks) -> None:
        self.counts = Counts()
        self._config = config
        self.holds = holds
        self._memory = memory
        self.readers: set[Connection] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        host, port = host_and_port(endpoint)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=config.most_readers)
        named = f"[{host}]" if ":" in host else host
        self.endpoint = f"tcp://{named}:{self._listener.getsockname()[1]}"
        self._buffers: queue.SimpleQueue[memoryview] = queue.SimpleQueue()  # one of each stream, while it is free
        for _ in range(config.streams):
            self._buffers.put(memoryview(bytearray(memory.block_bytes)))
        self._most_read_bytes = min(MAX_READ_BYTES, 2 * TOKEN_BYTES * config.most_tokens + 64 * 1024)
        threading.Thread(target=self._accept, name="kv-source", daemon=True).start()

    def close(self) -> None:
        """End all streams; their threads give their blocks back."""
        with self._lock:
            self._is_closed = True
            for connection in self.readers:
                connection.shut()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the wait in `accept`
        self._listener.close()

    # ---- connections

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connected, _ = self._listener.accept()
            except OSError as error:
                if not self._is_closed:
                    log.warning("a neighbour cannot be let in: %s", error)
                    time.sleep(0.1)  # it is short of descriptors: others need the processor
                continue
            connection = Connection(connected)
            with self._lock:
                has_room = not self._is_closed and len(self.readers) < self._config.most_readers
                if has_room:
                    self.readers.add(connection)
            if not has_room:
                self.counts.fail("full")
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), name="kv-stream", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            patience = Patience(time.monotonic() + self._config.handshake_s)
            challenge = Challenge(self._config.secret)
            connection.send(patience, challenge.sent)
            try:
                connection.session = challenge.accept(connection.receive(REPLY_BYTES, patience))
            except NotProven as error:
                raise Lost("proof", str(error)) from error
            connection.send_frame(Welcome({"tcp": b""}), patience)
            while True:
                if not connection.wait_for_more(IDLE_S):
                    raise Lost("idle")
                patience = Patience(time.monotonic() + self._config.handshake_s)
                body = connection.receive_frame(self._most_read_bytes, patience)
                try:
                    request = decode_read(body)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    raise Lost("protocol", f"a request cannot be read: {error}") from error
                self._answer(connection, request)
        except Lost as lost:
            if lost.reason != "idle":
                self.counts.fail(lost.reason)
                log.debug("a reader is gone: %s", lost)
        finally:
            with self._lock:
                self.readers.discard(connection)
            connection.close()

    # ---- a stream

    def _answer(self, connection: Connection, request: Read) -> None:
        until_s = time.monotonic() + min(self._config.lease_s, request.patience_s)
        patience = Patience(until_s, stall_s=self._config.stall_s)
        reason = refusal(request, self._config)
        if reason == "invalid" and not request.prompt:
            chains = self.holds.hottest(request.stop, request.model, HOLD_S)
            wholes = (Pull("", chain, 0, range(len(chain.keys)), 0.0) for chain in chains)
            connection.send_frame(Prefixes([read_of(whole, self._config, 0.0) for whole in wholes]), patience)
            return
        if reason:
            self.counts.fail(reason)
            connection.send_frame(Offer(0, reason), patience)
            return
        try:
            buffer = self._buffers.get(timeout=max(0.0, min(self._config.turn_s, until_s - time.monotonic())))
        except queue.Empty:
            self.counts.fail("busy")
            connection.send_frame(Offer(0, "busy"), patience)
            return
        try:
            chain = chain_of(request, self._config.block_size)
            held = self.holds.hold(chain, request.start, request.stop, HOLD_S)
            began_s = time.monotonic()
            try:
                connection.send_frame(Offer(len(held.blocks), held.reason), patience)
                for index, block in enumerate(held.blocks, start=request.start):
                    self._memory.read([block], [buffer])
                    header = Block(
                        index=index,
                        tokens=chain.tokens_of(index),
                        exact=chain.exact.get(index),
                        checksum=xxh3_128_digest(buffer),
                        size=len(buffer),
                    )
                    connection.send_frame(header, patience, buffer)
                    self.counts.add(len(buffer))
            finally:
                self.holds.give_back(held)
                self.counts.took(time.monotonic() - began_s)
        finally:
            self._buffers.put(buffer)


def refusal(request: Read, config: NeighbourConfig) -> str:
    """Return why this is never answered with blocks; empty if it may be."""
    if request.kv_layout != config.kv_layout:
        return "layout"
    if request.model != config.model:
        return "model"
    stop_bytes = request.stop * config.block_size * TOKEN_BYTES
    is_prompt = len(request.prompt) == stop_bytes <= config.most_tokens * TOKEN_BYTES
    return "" if is_prompt and request.start < request.stop else "invalid"


def chain_of(request: Read, block_size: int) -> Chain:
    """Return the request's chain, a token longer than its blocks: a pool matches no chain to its last token."""
    return Chain(
        [*memoryview(request.prompt).cast("I"), 0],
        block_size,
        request.model,
        lora_name=request.lora_name,
        lora_digest=request.lora_digest,
        cache_salt=request.cache_salt,
        extras=request.extras,
    )
