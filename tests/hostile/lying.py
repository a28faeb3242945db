"""The sockets of one replica, driven by hand: a test chooses its claims."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from events.blocks import block_keys, root_key
from events.cache.pool import Digest
from events.messages import BlockStored, EventBatch, KnownEvent, encode_batch
from events.native import SNAPSHOT_REQUEST, Load, Status, encode_native
from events.source import Source
from tests.events.test_subscriber import until

ANY = "tcp://127.0.0.1:0"
SIZE = 4
NOTHING = Digest(0, 0)
ROOT = root_key("m", None, None, SIZE)


def tokens_of(blocks: int, first: int = 0) -> list[int]:
    return [number % 50_000 for number in range(first * SIZE, (first + blocks) * SIZE)]


def keys_of(blocks: int) -> list[Any]:
    return block_keys(tokens_of(blocks), SIZE, ROOT)


def stored(
    hashes: Sequence[int], parent: int | None = None, tokens: list[int] | None = None, **more: object
) -> BlockStored:
    own = tokens_of(len(hashes)) if tokens is None else tokens
    fields = {"block_size": SIZE, "lora_id": None, "medium": "GPU", "lora_name": None, **more}
    return BlockStored(list(hashes), parent, own, **fields)  # type: ignore[arg-type]


def batch(*events: KnownEvent) -> bytes:
    return encode_batch(EventBatch(0.0, list(events)))


class Liar:
    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", *, native: bool = True) -> None:
        self._context = context
        self.native = native
        self.incarnation = 1
        self.seq = -1
        self.events = self._bound(zmq.XPUB)  # it sees who subscribes
        self.status = self._bound(zmq.PUB)
        self.snapshot = self._bound(zmq.ROUTER)
        self.replay = self._bound(zmq.ROUTER)

    def _bound(self, kind: int) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.linger = 0
        socket.sndhwm = 0
        socket.bind(ANY)
        return socket

    @property
    def source(self) -> Source:
        ends = [
            one.getsockopt_string(zmq.LAST_ENDPOINT) for one in (self.events, self.replay, self.status, self.snapshot)
        ]
        events, replay, status, snapshot = ends
        return Source("?", events, replay, status, snapshot) if self.native else Source("?", events, replay, model="m")

    async def subscribed(self) -> None:
        await until(lambda: bool(self.events.poll(0)))
        self.events.recv()

    def publish(self, payload: bytes) -> None:
        self.seq += 1
        self.events.send_multipart([b"", self.seq.to_bytes(8, "big"), payload])

    def say(self, digest: Digest = NOTHING, load: Load | None = None) -> bool:
        """Send a status; always False, as a condition that is still waited for."""
        status = Status(self.incarnation, self.seq, 0.0, digest.blocks, digest.xor, load or Load())
        self.status.send_multipart([b"", encode_native(status)])
        return False

    async def answer_snapshot(self, *payloads: bytes, batches: int | None = None) -> None:
        """Answer the next request for the whole cache."""
        await until(lambda: bool(self.snapshot.poll(0)))
        peer, _, request = self.snapshot.recv_multipart()
        assert request == SNAPSHOT_REQUEST
        claimed = len(payloads) if batches is None else batches
        header = {"incarnation": self.incarnation, "seq": self.seq, "ts": 0.0, "batches": claimed, "model": "m"}
        for payload in (encode_native(header), *payloads):  # type: ignore[arg-type]
            self.snapshot.send_multipart([peer, b"", payload])

    async def answer_replay(self, *replies: tuple[int, bytes]) -> int:
        """Answer the next request for a replay; from where it was to begin."""
        await until(lambda: bool(self.replay.poll(0)))
        return self._replay(lambda _: replies)

    async def keep_answering(self, payloads: Sequence[bytes]) -> None:
        """Answer every request, as a publisher does: a reader that stood still asks once more."""
        while True:
            if self.snapshot.poll(0):
                await self.answer_snapshot(*payloads)
            if self.replay.poll(0):
                self._replay(lambda start: list(enumerate(payloads))[start:])
            await asyncio.sleep(0.002)

    def _replay(self, replies_from: Callable[[int], Sequence[tuple[int, bytes]]]) -> int:
        peer, _, asked = self.replay.recv_multipart()
        start = int.from_bytes(asked, "big")
        for seq, payload in replies_from(start):
            self.replay.send_multipart([peer, b"", b"", seq.to_bytes(8, "big"), payload])
        self.replay.send_multipart([peer, b"", b"", b"\xff" * 8, b""])
        return start

    def close(self) -> None:
        for socket in (self.events, self.status, self.snapshot, self.replay):
            socket.close()
