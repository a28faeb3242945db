"""The sockets between routers, and the memory between workers: each tells what its outbox holds, and hears the others.

One key pair may serve all routers of a fleet: with it, nobody else reads or is read. A peer that is lost, slow or
strange costs guesses, and nothing waits for it.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from math import inf

import msgspec
import zmq

from events.messages import Frames
from events.sockets.curve import CurveClient, CurveKeys
from events.sockets.curve_link import CurveLink
from events.sockets.link import Link
from events.sockets.peers import INSPECT_S, BoundSocket, PublisherStats
from events.sockets.plain_link import PlainLink
from router.placement.load import ReplicaLoad
from router.placement.outbox import RUNNING_S, Outbox, PeerBatch
from router.placement.placement import Placement
from router.workers.peer_inbox import MAX_PEERS, Inbox
from router.workers.peer_names import Names
from router.workers.processes import Place

log = logging.getLogger(__name__)

TOPIC = b"warmroute.peers.1"  # another version has another topic: the two do not hear each other
LOOK_UP_S = 5.0  # how often names are looked up again
SOON_S = 1.0  # while there is none: another worker may start
STOOD_STILL_S = 1.0  # between two beats: what peers have said meanwhile is still to be read
WAITING_BATCHES = 1000  # the most for one peer
MAX_BATCH_BYTES = 32 * 2**20

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(PeerBatch).decode


class PeerSockets:
    """The socket that peers listen to, and `link`, which makes those that listen to peers."""

    def __init__(self, listen: str, keys: CurveKeys | None) -> None:
        """Raise OSError if nothing can listen at the endpoint."""
        self._loop = asyncio.get_running_loop()
        self._keys = keys
        self._inspecting: asyncio.TimerHandle | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = None if keys is None else keys.authenticator(self._context)
        more = {"waiting_messages": WAITING_BATCHES, "most_peers": MAX_PEERS}
        try:
            self._bound = BoundSocket(self._context, zmq.PUB, listen, curve=keys, stats=PublisherStats(), **more)
        except BaseException as error:
            self._end()
            if isinstance(error, zmq.ZMQError):
                raise OSError(f"--peer-listen {listen}: {error}; choose another endpoint") from error
            raise
        self.endpoint = self._bound.endpoint
        peers = self._bound.peers
        self._watched = int(peers.monitor.FD), peers.arrivals.fileno()
        self._loop.add_reader(self._watched[0], peers.watch)
        self._loop.add_reader(self._watched[1], self._arrived)
        peers.watch()  # the descriptor is edge-triggered
        ours = None if keys is None else CurveClient(keys.public, keys.public, keys.secret)
        self.link = PlainLink if ours is None else partial(CurveLink, self._context, ours)

    @property
    def are_heard(self) -> bool:
        return len(self._bound.peers) > 0

    def send(self, frames: Frames) -> None:
        with suppress(zmq.Again):  # it is lost, as if on the way
            self._bound.socket.send_multipart(frames, zmq.NOBLOCK)

    def _arrived(self) -> None:
        self._loop.remove_reader(self._watched[1])
        self._inspecting = self._loop.call_later(INSPECT_S, self._inspect)

    def _inspect(self) -> None:
        self._bound.peers.inspect()
        self._loop.add_reader(self._watched[1], self._arrived)

    def close(self) -> None:
        if self._inspecting is not None:
            self._inspecting.cancel()
        for descriptor in self._watched:
            self._loop.remove_reader(descriptor)
        self._bound.close(linger_ms=0)
        self._end()

    def _end(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(linger=0)


class Links:
    """`run` it in a task, and `close` it. `on_room` is called when a replica may have more room than before."""

    def __init__(
        self,
        placement: Placement,
        load_of: Callable[[str], ReplicaLoad | None],
        on_room: Callable[[], None],
        listen: str | None,
        peers: Iterable[str] = (),
        keys: CurveKeys | None = None,
        sockets: Callable[[str, CurveKeys | None], PeerSockets] = PeerSockets,
        place: Place | None = None,
    ) -> None:
        """`listen`: None, unless there are other routers; `place`: if there are other workers."""
        self._loop = asyncio.get_running_loop()
        self._sockets = None if listen is None else sockets(listen, keys)
        self.endpoint = "" if self._sockets is None else self._sockets.endpoint
        self._place = place
        if place is not None:
            placement.hear = self._read
        self.unreadable = 0  # messages
        self._on_room = on_room
        self._placement = placement
        self._names = Names(peers)
        self._peers = "other workers" if listen is None else "peers"  # these may be workers, too
        self._links: dict[str, Link] = {}  # sockets to peers, by endpoint
        self._warned: set[str] = set()
        self._said = 0  # number of peers, in the log
        self._telling: asyncio.TimerHandle | None = None
        self._number = random.getrandbits(63)
        self.inbox = Inbox(placement, load_of, self._number)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            if self._sockets is not None:
                tasks.create_task(self._look_up())  # a lookup may take long: peers must hear of us meanwhile
            tasks.create_task(self._beat())

    async def _look_up(self) -> None:
        while True:
            endpoints = await self._names.endpoints()
            self._connect(endpoints)
            await asyncio.sleep(LOOK_UP_S if endpoints else SOON_S)

    async def _beat(self) -> None:
        beat_s = -inf
        while True:
            now_s = self._loop.time()
            for link in self._links.values():
                link.tick()
            has_peers = self._sockets is not None and self._sockets.are_heard
            if not has_peers and (self._place is None or self._place.serving[0] < 2):
                self._placement.outbox = None  # nobody is told, so no request has to say anything
            else:
                if self._placement.outbox is None:
                    self._placement.outbox = Outbox(self._number, self._tell_within)
                self._placement.outbox.gathers = has_peers
            self._tell()
            if now_s - beat_s < RUNNING_S + STOOD_STILL_S and self.inbox.expire(now_s):
                self._on_room()
            beat_s = now_s
            heard = len(self.inbox.peers)
            if heard != self._said:
                level = logging.INFO if heard > self._said else logging.WARNING
                log.log(level, "%s heard: %d (before: %d)", self._peers, heard, self._said)
                self._said = heard
            await asyncio.sleep(RUNNING_S)

    def close(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
        self._placement.hear = None
        self._connect(frozenset())
        if self._sockets is not None:
            self._sockets.close()

    # ---- to peers

    def _tell_within(self, seconds: float) -> None:
        if self._telling is not None:
            self._telling.cancel()
        self._telling = self._loop.call_later(seconds, self._tell)

    def _tell(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        if (outbox := self._placement.outbox) is not None:
            for batch in outbox.take(self._loop.time(), time.time()):
                message = _encode(batch)
                if self._place is not None:
                    self._place.ring.write(message)
                if self._sockets is not None:
                    self._sockets.send([TOPIC, message])

    # ---- from peers

    def _heard(self, messages: list[Frames]) -> None:
        has_room = False
        for frames in messages:
            try:
                _, payload = frames
                batch = _decode(payload)
            except ValueError:  # every error of msgspec is one
                self.unreadable += 1
                continue
            has_room |= self.inbox.hear(batch, self._loop.time(), time.time())
        if has_room:
            self._on_room()

    def _read(self) -> None:
        """Hear of what other workers have written since; this is called while a request is placed."""
        assert self._place is not None, "there are other workers"
        outbox, has_room = self._placement.outbox, False
        at_s = time.time() if outbox is not None and outbox.gathers else None
        for message in self._place.ring.read():
            has_room |= self.inbox.hear(_decode(message), self._loop.time(), at_s)
        if has_room:
            self._loop.call_soon(self._on_room)

    def _connect(self, endpoints: frozenset[str]) -> None:
        for endpoint in self._links.keys() - endpoints:
            self._links.pop(endpoint).close()
        for endpoint in sorted(endpoints - self._links.keys()):
            assert self._sockets is not None, "else nobody is named"
            self._links[endpoint] = self._sockets.link(
                "peers", endpoint, self._heard, topic=TOPIC, most_bytes=MAX_BATCH_BYTES, warned=self._warned
            )
