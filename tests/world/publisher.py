"""Sockets that are bound: a replica's for its events, by the shipped mirror and messages, and a router's for its peers.

Those that ship are libzmq's (decision 0055). Here is the other end of `events.sockets.zmtp`, over the world's network.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from events.messages import END_SEQ, BlockRemoved, BlockStored, EventBatch, Frames, KnownEvent, encode_batch
from events.mirror import Mirror
from events.native import Load, SnapshotHeader, Status, encode_native
from events.publisher import EventEndpoints
from events.sockets.plain_link import PlainLink
from events.sockets.zmtp import Zmtp, message
from router.workers.peer_names import parse_endpoint
from tests.world.network import Host, Network

EVENTS, REPLAY, STATUS, SNAPSHOT = PORTS = 5557, 5558, 5559, 5560
ASKED = REPLAY, SNAPSHOT
TOPIC = b"kv"
MAX_UNSENT_BYTES = 64_000  # to one peer; what comes then is lost to it
KEPT_BATCHES = 50  # for replays


class _Bound(Zmtp):
    """The side that is connected to: it takes whoever speaks."""

    def _command(self, body: bytes, flags: int) -> None:
        del body, flags
        self.ready = True


class _Peer(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self, publisher: "Publisher | PeerSockets", port: int) -> None:
        self._publisher, self._port = publisher, port
        self._zmtp = _Bound(b"ROUTER" if port in ASKED else b"PUB", 1_000_000)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.transport.write(self._zmtp.opening)
        self._publisher.met(self)

    def data_received(self, data: bytes) -> None:
        self._zmtp.feed(data)
        for frames in self._zmtp.take(100):
            self._publisher.heard(self, self._port, frames)

    def connection_lost(self, error: Exception | None) -> None:
        del error
        self._publisher.lost(self, self._port)

    def send(self, frames: Frames) -> None:
        if self.transport.get_write_buffer_size() < MAX_UNSENT_BYTES:
            self.transport.write(message(frames))


class Publisher:
    def __init__(
        self, network: Network, host: Host, incarnation: int, model: str, happens: Callable[[str], None]
    ) -> None:
        self.incarnation = incarnation
        self.lost_share = 0.0  # of the batches
        self.published_s = 0.0  # when it was last given any
        self.subscribers: dict[int, dict[_Peer, None]] = {port: {} for port in PORTS}
        self._seq = -1
        self._kept: list[tuple[int, bytes]] = []
        self._mirror = Mirror()
        self._model, self._happens = model, happens
        self._loop = network.loop
        for port in PORTS:
            network.listen(partial(_Peer, self, port), host.address, port)
        self.endpoints = EventEndpoints(*(f"tcp://{host.address}:{port}" for port in PORTS))

    def publish(self, events: Sequence[KnownEvent]) -> None:
        self.published_s = self._loop.time()
        self._mirror.apply(events)
        self._seq += 1
        payload = encode_batch(EventBatch(self._loop.time(), list(events)))
        self._kept = [*self._kept[1 - KEPT_BATCHES :], (self._seq, payload)]
        if self._loop.chance.random() < self.lost_share:
            return
        for peer in self.subscribers[EVENTS]:
            peer.send([TOPIC, self._seq.to_bytes(8, "big"), payload])

    def report(self, load: Load) -> None:
        digest = self._mirror.digest()
        status = Status(self.incarnation, self._seq, self._loop.time(), digest.blocks, digest.xor, load)
        for peer in self.subscribers[STATUS]:
            peer.send([TOPIC, encode_native(status)])

    def met(self, peer: _Peer) -> None:
        """Wait until it says what it wants."""

    def lost(self, peer: _Peer, port: int) -> None:
        self.subscribers[port].pop(peer, None)

    def heard(self, peer: _Peer, port: int, frames: Frames) -> None:
        if port in (EVENTS, STATUS):
            self.subscribers[port][peer] = None  # to all there is
        elif port == REPLAY:
            start = int.from_bytes(frames[-1], "big")
            for seq, payload in self._kept:
                if seq >= start:
                    peer.send([b"", TOPIC, seq.to_bytes(8, "big"), payload])
            peer.send([b"", b"", END_SEQ, b""])
        else:
            now_s = self._loop.time()
            batches = self._mirror.snapshot(now_s)
            header = SnapshotHeader(self.incarnation, self._seq, now_s, len(batches), self._model)
            for payload in (encode_native(header), *batches):
                peer.send([b"", payload])
            self._happens("snapshot")


class PeerSockets:
    """Stands for `router.workers.peer_links.PeerSockets`, in plain text."""

    link = PlainLink

    def __init__(self, network: Network, listen: str, keys: object) -> None:
        del keys
        host, port = parse_endpoint(listen) or ("", 0)
        self.endpoint = listen
        self._peers: dict[_Peer, bool] = {}  # True: it has subscribed
        self._listener = network.listen(partial(_Peer, self, port), host, port)

    @property
    def are_heard(self) -> bool:
        return any(self._peers.values())

    def send(self, frames: Frames) -> None:
        for peer, has_subscribed in self._peers.items():
            if has_subscribed:
                peer.send(frames)

    def heard(self, peer: _Peer, port: int, frames: Frames) -> None:
        del port, frames
        self._peers[peer] = True

    def met(self, peer: _Peer) -> None:
        self._peers[peer] = False

    def lost(self, peer: _Peer, port: int) -> None:
        del port
        self._peers.pop(peer, None)

    def close(self) -> None:
        self._listener.close()
        for peer in self._peers:
            peer.transport.abort()


class Cache:
    """Blocks by key, the one used last at the end; what comes and goes is published."""

    def __init__(self, capacity: int, block_tokens: int) -> None:
        self.blocks: dict[int, None] = {}
        self._capacity, self._block_tokens = capacity, block_tokens

    def hit(self, keys: Sequence[int]) -> int:
        """Return how many of a prompt's blocks are there; they are used now."""
        count = next((at for at, key in enumerate(keys) if key not in self.blocks), len(keys))
        for key in reversed(keys[:count]):
            del self.blocks[key]
            self.blocks[key] = None
        return count

    def store(self, keys: Sequence[int], tokens: Sequence[int], salt: str | None) -> list[Any]:
        """Store a prompt's blocks; return the events."""
        first = self.hit(keys)
        new = list(keys[first:][: self._capacity])
        if not new:
            return []
        events: list[KnownEvent] = []
        if surplus := len(self.blocks) + len(new) - self._capacity:
            evicted = [key for key in list(self.blocks)[: max(0, surplus)] if key not in keys[:first]]
            for key in evicted:
                del self.blocks[key]
            if evicted:
                events.append(BlockRemoved(list(evicted), "GPU"))
        of_new = tokens[first * self._block_tokens : (first + len(new)) * self._block_tokens]
        parent = keys[first - 1] if first else None
        extra = [[salt], *(None for _ in new[1:])] if salt is not None and not first else None
        events.append(BlockStored(list(new), parent, of_new, self._block_tokens, None, "GPU", None, extra))
        self.blocks.update(dict.fromkeys(new))
        return events
