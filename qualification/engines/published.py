"""The batches of an engine's events, as it published them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import zmq

from events.messages import EventBatch, decode_batch
from qualification.engines.engine import Engine

QUIET_MS = 500  # no batch is under way if none has come for this long


class Published:
    """All batches since the engine's start, by data-parallel rank. Their sockets keep them until somebody asks."""

    def __init__(self, sockets: Sequence["zmq.Socket[bytes]"]) -> None:
        self._sockets = sockets
        self._batches: list[list[EventBatch]] = [[] for _ in sockets]

    def batches(self, rank: int) -> list[EventBatch]:
        """Return a rank's batches so far, in the order of their numbers."""
        batches, socket = self._batches[rank], self._sockets[rank]
        while socket.poll(QUIET_MS):
            _, number, payload = socket.recv_multipart()
            assert int.from_bytes(number, "big") == len(batches), f"rank {rank}: no batch has number {len(batches)}"
            batches.append(decode_batch(payload))
        return batches


@contextmanager
def published(running: Engine) -> Iterator[Published]:
    """Subscribe to every rank of an engine that has published nothing yet."""
    with zmq.Context() as context:
        sockets = [context.socket(zmq.SUB) for _ in range(running.ranks)]
        for rank, socket in enumerate(sockets):
            socket.set(zmq.RCVHWM, 0)  # no limit
            socket.set(zmq.LINGER, 0)
            socket.subscribe(b"")
            socket.connect(f"tcp://127.0.0.1:{running.events_port + rank}")
        try:
            yield Published(sockets)
        finally:
            for socket in sockets:
                socket.close()
