"""A subscriber's connection to a publisher: made again at once after a cut, less and less often if it never lasts."""

import logging
import random
from collections.abc import Callable
from contextlib import suppress

import zmq
from zmq.utils.monitor import parse_monitor_message

from events.messages import Frames

log = logging.getLogger(__name__)

RECONNECT_S = 2.0  # ZeroMQ gives up a connection that broke its rules for good: it is made anew after so long
LET_IN_S = 1.0  # a publisher that is full ends a connection sooner
FIRST_PAUSE_S = 0.1  # doubled with each short connection
LONGEST_PAUSE_S = 10.0


class Reconnects:
    """Schedules reconnects. ZeroMQ reconnects 20 times a second unless `lost` returns a pause."""

    def __init__(self, now_s: float, jitter: Callable[[], float] = lambda: random.uniform(0.5, 1.0)) -> None:
        self._jitter = jitter  # subscribers that were shut out together should not all return together
        self._connected_s: float | None = None
        self._short = 0  # connections in a row that ended at once
        self._due_s = now_s + RECONNECT_S

    def connected(self, now_s: float) -> None:
        self._connected_s = now_s

    def lost(self, now_s: float) -> float | None:
        """Return for how long not to connect; None: no longer than ZeroMQ waits."""
        lasted = self._connected_s is not None and now_s - self._connected_s >= LET_IN_S
        self._connected_s = None
        self._short = 0 if lasted else self._short + 1
        if self._short < 2:
            self._due_s = now_s + RECONNECT_S
            return None
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self._short - 1, 10)) * self._jitter()
        self._due_s = now_s + pause_s
        return pause_s

    def is_due(self, now_s: float) -> bool:
        """Return whether to reconnect now; the caller then has RECONNECT_S to do so."""
        if self._connected_s is not None or now_s < self._due_s:
            return False
        self._due_s = now_s + RECONNECT_S
        return True


class Connection:
    """One SUB socket's connection; `monitor` is to be read and its frames given to `observe`."""

    def __init__(self, name: str, socket: "zmq.Socket[bytes]", endpoint: str, now_s: float) -> None:
        self.paused = False
        self._name = name
        self._socket = socket
        self._endpoint = endpoint
        self._reconnects = Reconnects(now_s)
        self._warned = False
        self.monitor: zmq.Socket[bytes] = socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )

    def open(self) -> None:
        self._socket.connect(self._endpoint)

    def observe(self, frames: Frames, now_s: float) -> bool | None:
        """Return whether it was made (True) or lost (False); None: neither counts."""
        made = parse_monitor_message(frames)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if self.paused:  # reported before it was paused
            return None
        if made:
            self._reconnects.connected(now_s)
        elif (pause_s := self._reconnects.lost(now_s)) is not None:
            self._pause(pause_s)
        return made

    def tick(self, now_s: float) -> None:
        if self._reconnects.is_due(now_s):
            self._disconnect()
            self.paused = False
            self.open()

    def _pause(self, pause_s: float) -> None:
        self.paused = True
        self._disconnect()
        if not self._warned:
            self._warned = True
            log.warning(
                "%s: %s ends each connection at once, perhaps because of too many subscribers; retrying in %.1f s",
                self._name,
                self._endpoint,
                pause_s,
            )

    def _disconnect(self) -> None:
        with suppress(zmq.ZMQError):  # there is none
            self._socket.disconnect(self._endpoint)
