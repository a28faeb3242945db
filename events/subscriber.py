"""Follows the streams of many replicas: the asyncio shell around `stream/`.

Each replica has a link to its events, and as needed one for replays; a native one also a link to its status and one for
snapshots. Every decision is the stream's; here bytes come and go.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Self

import zmq

from events.messages import Frames
from events.native import SNAPSHOT_REQUEST, Status
from events.sockets.curve_link import CurveLink
from events.sockets.link import Link, Receive, size_of
from events.sockets.plain_link import PlainLink
from events.source import Source
from events.stream.actions import Replay
from events.view import CacheView, Request

TICK_S = 0.1  # one for all replicas: each one wakes a process that has nothing to do
MENDING_TICK_S = 0.05  # while a stream is not exact
STANDSTILL_S = 0.5  # after this long without a tick, a busy publisher may have filled all queues on the way
MAX_MESSAGE_BYTES = 8 * 2**20  # a prompt of a million tokens in one event; who sends more loses the connection
MAX_WAITING_BYTES = 64 * 2**20  # messages that wait while a long batch is applied; an event beyond is a gap
# An answer beyond is not read yet: the publisher still has it, but would not send it again.
MAX_WAITING_ANSWER_BYTES = MAX_WAITING_BYTES // 2
ANSWERS = "replay", "snapshot"

# Called with the socket that frames came by ("events", "replay", "status", "snapshot"; "connected" and "disconnected"
# without frames, for the event socket) and the frames, before they are acted on; with "tick" after the passing of time
# changed something; and with "standstill" when this process has not run for long. A view that is given the same in the
# same order comes to the same (recording.py).
Tap = Callable[[str, Frames], None]


class Subscriber:
    """Use as an async context manager; replicas come and go by `add` and `remove`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        self._sockets: dict[str, _Sockets] = {}
        self._timer: asyncio.TimerHandle | None = None  # while there are any
        self._ticked_s = 0.0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def add(
        self,
        source: Source,
        view: CacheView | None = None,
        *,
        on_status: Callable[[Status], None] | None = None,
        tap: Tap | None = None,
    ) -> CacheView:
        if source.name in self._sockets:
            raise ValueError(f"a replica named {source.name!r} is already followed; names must differ")
        source.check()
        view = view or source.view()
        view.on_status = on_status
        self._sockets[source.name] = _Sockets(self, source, view, tap)
        if self._timer is None:
            self._wait()
        return view

    def remove(self, name: str) -> None:
        self._sockets.pop(name).close()
        if not self._sockets and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def resync(self, name: str, reason: str) -> None:
        """Ask the replica for its whole cache, because the view is in doubt."""
        self._sockets[name].resync(reason)

    def probe(self, name: str) -> None:
        """Ask the replica for the end of its stream, as after a standstill."""
        self._sockets[name].tick_late()

    @property
    def stands_still(self) -> bool:
        """True if this process has not run for long, and no stream has been told of it yet."""
        return self._clock() - self._ticked_s > STANDSTILL_S

    def close(self) -> None:
        for name in list(self._sockets):
            self.remove(name)
        # A socket that an error has left open would make `term` wait for ever; all are of this thread.
        self._context.destroy(linger=0)

    def _wait(self) -> None:
        self._ticked_s = self._clock()
        loop = asyncio.get_running_loop()
        tick_s = TICK_S if all(sockets.exact for sockets in self._sockets.values()) else MENDING_TICK_S
        # Ticks come at round times: others in this process wake it at the same moment.
        self._timer = loop.call_at((loop.time() // tick_s + 1) * tick_s, self._tick)

    def _tick(self) -> None:
        stood_still = self.stands_still
        self._wait()
        for sockets in self._sockets.values():
            # One by one, so that an error of one ends nothing of the others.
            sockets.loop.call_soon(sockets.tick_late if stood_still else sockets.tick)


class _Sockets:
    """The links to one replica, and the view they serve."""

    def __init__(self, owner: Subscriber, source: Source, view: CacheView, tap: Tap | None) -> None:
        self._context, self._clock = owner._context, owner._clock
        self._source = source
        self._view = view
        self._tap = tap
        self.loop = asyncio.get_running_loop()
        self._links: dict[str, Link] = {}  # links by purpose: events, status, replay, snapshot
        self._warned: set[str] = set()  # endpoints
        self._closed = False
        self._waiting: deque[tuple[str, Frames]] = deque()  # messages that wait for the end of a long batch
        self._waiting_bytes = 0
        self._taking: asyncio.Handle | None = None  # the next turn of the waiting messages
        self._going = False  # a slice is to be done soon
        self._busy_since_s = 0.0
        self._doubt: str | None = None  # why all is to be asked for again then
        self._stood_still = False  # the stream is to be told
        try:
            self._link(
                "events",
                source.events,
                partial(self._receive, "events"),
                topic=source.topic.encode(),
                connected=partial(self._changed, "connected"),
                lost=partial(self._changed, "disconnected"),
            )
            if source.status is not None:
                self._link("status", source.status, partial(self._receive, "status"), topic=b"")
        except BaseException:
            self.close()
            raise

    def _link(
        self, name: str, endpoint: str, receive: Receive, *, topic: bytes | None = None, **heard: Callable[[], object]
    ) -> None:
        curve = self._source.curve
        kind = PlainLink if curve is None else partial(CurveLink, self._context, curve)
        self._links[name] = kind(
            self._source.name,
            endpoint,
            receive,
            topic=topic,
            most_bytes=MAX_MESSAGE_BYTES,
            warned=self._warned,
            **heard,
            room=lambda: math.inf if topic is not None else MAX_WAITING_ANSWER_BYTES - self._waiting_bytes,
        )

    def close(self) -> None:
        """Stop; also works within a callback, and sends no further request."""
        self._closed = True
        for name in list(self._links):
            self._close(name)

    def resync(self, reason: str) -> None:
        if self._view.busy:
            self._doubt = reason
        else:
            self._act(self._view.perform(self._view.stream.resync(reason, self._clock())))

    # ---- a long batch

    def _act(self, requests: list[Request]) -> None:
        """Send a step's requests; do the rest of a long step in slices."""
        self._send(requests)
        if self._view.busy and not self._going and not self._closed:
            self._going = True
            self._busy_since_s = self._clock()
            self.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        if self._closed:
            return
        view = self._view
        try:
            self._send(view.go_on())
        finally:
            if view.busy:
                self.loop.call_soon(self._go_on)
            else:
                self._going = False
                view.stream.delayed(self._clock() - self._busy_since_s)
                self._take_soon()

    def _take_soon(self) -> None:
        if self._taking is None:
            self._taking = self.loop.call_soon(self._take_waiting)

    def _take_waiting(self) -> None:
        """Take messages that arrived during a long batch, one by one: one may be another long batch."""
        self._taking = None
        if self._closed or self._view.busy:
            return
        if self._doubt is not None:
            reason, self._doubt = self._doubt, None
            self._take_soon()
            self.resync(reason)
        elif self._waiting:
            name, frames = self._waiting.popleft()
            self._waiting_bytes -= size_of(frames)
            self._take_soon()  # first: an error of one ends nothing of the others
            self._read_on()
            self._take(name, frames)

    def _read_on(self) -> None:
        """There is room for answers again."""
        for name in ANSWERS:
            if name in self._links:
                self._links[name].read_on()

    def _keep(self, name: str, messages: list[Frames]) -> None:
        for frames in messages:
            size = size_of(frames)
            if name != "events" or self._waiting_bytes + size <= MAX_WAITING_BYTES:
                self._waiting.append((name, frames))
                self._waiting_bytes += size

    def _take(self, name: str, frames: Frames) -> None:
        if name in self._links or name in ("connected", "disconnected"):
            self._mark(name, frames)
            self._act(self._view.receive(name, frames, self._clock()))
        if name == "disconnected" and not self._closed and self._links["events"].paused:
            self._drop("replay")  # it has no room for these either
            self._drop("snapshot")

    @property
    def _must_wait(self) -> bool:
        return self._view.busy or bool(self._waiting)

    # ---- messages

    def _changed(self, what: str) -> None:
        """The event socket was connected or disconnected."""
        if self._must_wait:
            self._keep(what, [[]])
        elif not self._closed:
            self._take(what, [])

    def _receive(self, name: str, messages: list[Frames]) -> None:
        if name in ANSWERS:  # read ahead, since a publisher drops batches for slow peers; apply them in order later
            self._keep(name, messages)
            self._take_soon()
            return
        link = self._links[name]
        for position, frames in enumerate(messages):
            if self._links.get(name) is not link:  # closed, or a request of ours voided the rest
                return
            if name != "status" and self._must_wait:
                self._keep(name, messages[position:])
                return
            self._take(name, frames)

    def _mark(self, socket: str, frames: Frames) -> None:
        if self._tap is not None:
            self._tap(socket, frames)

    @property
    def exact(self) -> bool:
        return self._view.stream.exact

    def tick_late(self) -> None:
        self._stood_still = True
        self.tick()

    def tick(self) -> None:
        for link in list(self._links.values()):
            link.tick()
        if "events" not in self._links or self._must_wait:  # closed, perhaps by a link's tick
            return
        now_s, stream = self._clock(), self._view.stream
        exact = stream.exact
        if self._stood_still:
            self._stood_still = False
            self._mark("standstill", [])
            self._act(self._view.receive("standstill", [], now_s))
        requests = [] if self._closed else self._view.receive("tick", [], now_s)
        if self._closed:
            return
        if requests or stream.exact != exact:
            self._mark("tick", [])
        self._act(requests)

    # ---- what goes out

    def _send(self, requests: list[Request]) -> None:
        for request in requests:
            if self._closed:  # a callback has closed it
                return
            if isinstance(request, Replay):
                if not self._view.replay_ended:  # replies to an older request may still come: they go with their socket
                    self._drop("replay")
                self._ask("replay", self._source.replay, request.start.to_bytes(8, "big"))
            else:
                self._drop("snapshot")
                self._ask("snapshot", self._source.snapshot, SNAPSHOT_REQUEST)

    def _drop(self, name: str) -> None:
        """Close the link, and drop its unread messages."""
        self._close(name)
        kept = [one for one in self._waiting if one[0] != name]
        if len(kept) != len(self._waiting):
            self._waiting = deque(kept)
            self._waiting_bytes = sum(size_of(frames) for _, frames in kept)
            self._read_on()

    def _ask(self, name: str, endpoint: str | None, request: bytes) -> None:
        assert endpoint is not None, f"{self._source.name} has no {name} socket"
        if name not in self._links:
            self._link(name, endpoint, partial(self._receive, name))
        self._view.asked(name)
        self._links[name].send([b"", request])

    def _close(self, name: str) -> None:
        if (link := self._links.pop(name, None)) is not None:
            link.close()
