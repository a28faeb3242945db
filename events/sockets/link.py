"""A connection to a publisher's socket that is made again when it ends: what plain and encrypted ones share."""

import asyncio
import logging
import math
import random
from collections.abc import Callable

from events.messages import Frames

RECONNECT_S = 2.0  # after a connection that was ended because its peer broke the rules
LET_IN_S = 1.0  # a publisher that is full ends a connection sooner
RETRY_S = 0.05  # doubled with each try that finds nobody
RETRY_AT_MOST_S = 0.5
FIRST_PAUSE_S = 0.1  # doubled with each short connection
LONGEST_PAUSE_S = 10.0

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 1.0  # the system would try for minutes, and less and less often
HANDSHAKE_S = 5.0
UNANSWERED_MS = 4000  # a request whose bytes are not acknowledged ends the connection
KEEPALIVE_S = 1, 1, 3  # idle for this long, then this often, and this many times without an answer

Receive = Callable[[list[Frames]], object]


class Reconnects:
    """Schedules reconnects; the caller does them."""

    def __init__(self, jitter: Callable[[], float] = lambda: random.uniform(0.5, 1.0)) -> None:
        self._jitter = jitter  # subscribers that were shut out together should not all return together
        self._connected_s: float | None = None
        self._short = 0  # connections in a row that ended at once
        self._failed = 0  # tries in a row that found nobody

    def connected(self, now_s: float) -> None:
        self._connected_s = now_s
        self._failed = 0

    def lost(self, now_s: float) -> float | None:
        """Return for how long not to connect; None: connections do not end at once, so a retry is enough."""
        lasted = self._connected_s is not None and now_s - self._connected_s >= LET_IN_S
        self._connected_s = None
        self._short = 0 if lasted else self._short + 1
        if self._short < 2:
            return None
        return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self._short - 1, 10)) * self._jitter()

    def retry(self) -> float:
        """Return in how many seconds to connect when there was nobody, or after a connection that had lasted."""
        self._failed += 1
        return min(RETRY_AT_MOST_S, RETRY_S * 2.0 ** min(self._failed - 1, 10)) * self._jitter()


def size_of(frames: Frames) -> int:
    return sum(map(len, frames))


class Link:
    """Calls `connected`, `receive` with some messages at a time, and `lost`, in the order in which they came.

    With a topic it subscribes (SUB), without it asks (DEALER). It reads on only while `room`, in bytes, is positive;
    call `read_on` when there is room again, and `tick` some times a second. It ends the connection of a peer whose
    message has more than `most_bytes` or zmtp.MAX_PARTS parts; `warned` keeps it from saying so again and again.
    """

    def __init__(
        self,
        name: str,
        endpoint: str,
        receive: Receive,
        *,
        topic: bytes | None = None,
        most_bytes: int,
        warned: set[str],
        connected: Callable[[], object] = lambda: None,
        lost: Callable[[], object] = lambda: None,
        room: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self.endpoint = endpoint
        self.paused = False  # the peer ends each connection at once
        self._name = name
        self._receive = receive
        self._topic = topic
        self._most_bytes = most_bytes
        self._warned = warned
        self._on_connected = connected
        self._on_lost = lost
        self._room = room
        self._loop = asyncio.get_running_loop()
        self._reconnects = Reconnects()
        self._timer: asyncio.Handle | None = None  # the next thing to do: connect, give up a handshake, read on
        self._full = False  # there may be more to read, but no room for it
        self._open()

    def _open(self) -> None:
        raise NotImplementedError

    def _drain(self) -> None:
        raise NotImplementedError

    def send(self, frames: Frames) -> None:
        raise NotImplementedError

    def tick(self) -> None:
        """Time has passed."""

    def close(self) -> None:
        """Stop; this also works within a callback."""
        self._cancel()

    def read_on(self) -> None:
        if self._full:
            self._full = False
            self._drain_soon()

    def _is_made(self) -> None:
        self._reconnects.connected(self._loop.time())
        self.paused = False
        self._on_connected()

    def _has_ended(self, at_least_s: float = 0.0) -> None:
        """The connection is gone: make another one after a pause."""
        pause_s = self._reconnects.lost(self._loop.time())
        self.paused = pause_s is not None
        self._full = False
        self._later(max(at_least_s, pause_s or self._reconnects.retry()), self._open)
        if pause_s is not None:
            self._warn(f"ends each connection at once, perhaps because of too many peers; retrying in {pause_s:.1f} s")
        self._on_lost()

    def _warn(self, what: str) -> None:
        if self.endpoint not in self._warned:
            self._warned.add(self.endpoint)
            log.warning("%s: %s %s", self._name, self.endpoint, what)

    def _drain_soon(self) -> None:
        self._cancel()
        self._timer = self._loop.call_soon(self._drain)

    def _later(self, seconds: float, do: Callable[[], object]) -> None:
        self._cancel()
        self._timer = self._loop.call_later(seconds, do)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
