"""A source that knows the secret and lies: real sockets and handshake, wrong answers."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeAlias

import msgspec
from xxhash import xxh3_128_digest

from replica.neighbours.connection import Connection, Patience
from replica.neighbours.messages import MAX_READ_BYTES, Block, Lost, Offer, Read, Welcome, decode_read
from replica.neighbours.sealed import REPLY_BYTES, Challenge
from replica.neighbours.source import chain_of
from tests.replica.engines import SIZE
from tests.replica.neighbours.replicas import BLOCK_BYTES, SECRET, payload_of

TALK_S = 10.0

Lie: TypeAlias = Callable[[Connection, Read, Patience], None]


class Liar:
    """Talks to one reader after the other, and says to each what `lie` does."""

    def __init__(self, lie: Lie) -> None:
        self._lie = lie
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                connected, _ = self._listener.accept()
            except OSError:
                return
            connection = Connection(connected)
            with suppress(Lost):
                self._talk(connection, Patience(time.monotonic() + TALK_S, stall_s=TALK_S))
            connection.close()

    def _talk(self, connection: Connection, patience: Patience) -> None:
        challenge = Challenge(SECRET)
        connection.send(patience, challenge.sent)
        connection.session = challenge.accept(connection.receive(REPLY_BYTES, patience))
        connection.send_frame(Welcome({"tcp": b""}), patience)
        while True:
            request = decode_read(connection.receive_frame(MAX_READ_BYTES, patience))
            self._lie(connection, request, patience)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


@contextmanager
def liar(lie: Lie) -> Iterator[Liar]:
    running = Liar(lie)
    try:
        yield running
    finally:
        running.close()


def true_block(request: Read, index: int) -> tuple[Block, bytes]:
    """Return what an honest source would send."""
    chain = chain_of(request, SIZE)
    payload = payload_of(chain, index)
    tokens = chain.tokens[index * SIZE : (index + 1) * SIZE].tobytes()
    return Block(index, tokens, chain.exact.get(index), xxh3_128_digest(payload), BLOCK_BYTES), payload


def lies_at(number: int, changed: Callable[[Block, bytes], tuple[Block, bytes]]) -> Lie:
    """Return a source that is honest but for one block."""

    def lie(connection: Connection, request: Read, patience: Patience) -> None:
        connection.send_frame(Offer(request.stop - request.start), patience)
        for index in range(request.start, request.stop):
            block, payload = true_block(request, index)
            if index - request.start == number:
                block, payload = changed(block, payload)
            connection.send_frame(block, patience, memoryview(payload))

    return lie


def with_header(**changes: object) -> Callable[[Block, bytes], tuple[Block, bytes]]:
    return lambda block, payload: (msgspec.structs.replace(block, **changes), payload)
