"""Apply one replica's frames, from sockets or a recording, to its view, without any I/O."""

import logging
import math
from collections.abc import Callable

from events.cache.pool import Digest
from events.messages import END_SEQ, Frames
from events.native import SnapshotHeader, Status, decode_snapshot_header, decode_status
from events.stream.native_stream import OVERSIZED
from events.view import CacheView, Request

log = logging.getLogger(__name__)

MAX_SNAPSHOT_BYTES = 256 * 2**20  # some three million blocks
STRANGE_PAUSE_S = 10.0  # between two lines of the log about messages that are none


class Feed:
    """Takes frames with the name of the socket they came by; answers with the requests that are to be sent."""

    def __init__(self, view: CacheView, on_status: Callable[[Status], None] | None = None) -> None:
        self.view = view
        self.replay_ended = False  # no reply to the last replay request can still come
        self._on_status = on_status
        self._header: SnapshotHeader | None = None
        self._snapshot: list[bytes] = []
        self._snapshot_bytes = 0
        self._model_given = bool(view.resolver.naming.model)
        self._strange_after_s = -math.inf
        self._oversized_logged = False
        self._strange = 0  # messages since the last line
        self._takers = {
            "events": self._event,
            "replay": self._replayed,
            "status": self._status,
            "snapshot": self._snapshot_part,
        }

    def receive(self, socket: str, frames: Frames, now_s: float) -> list[Request]:
        return self._takers[socket](frames, now_s)

    def connected(self, now_s: float) -> list[Request]:
        return self.view.perform(self.view.stream.connected(now_s))

    def disconnected(self) -> None:
        self.view.stream.disconnected()

    def tick(self, now_s: float) -> list[Request]:
        return self.view.perform(self.view.stream.tick(now_s))

    def stood_still(self, now_s: float) -> list[Request]:
        return self.view.perform(self.view.stream.stood_still(now_s))

    def resync(self, reason: str, now_s: float) -> list[Request]:
        return self.view.perform(self.view.stream.resync(reason, now_s))

    def asked(self, socket: str) -> None:
        """Note a new request: earlier answers belong to an older one."""
        if socket == "replay":
            self.replay_ended = False
        else:
            self._header, self._snapshot, self._snapshot_bytes = None, [], 0

    def _event(self, frames: Frames, now_s: float) -> list[Request]:
        if len(frames) != 3 or len(frames[1]) != 8:
            return self._ignored("events", frames, now_s)
        seq = int.from_bytes(frames[1], "big")
        return self.view.perform(self.view.stream.live(seq, frames[2], now_s))

    def _replayed(self, frames: Frames, now_s: float) -> list[Request]:
        """`[b"", topic, seq, payload]`, or before vLLM 0.26 without the topic."""
        if len(frames) not in (3, 4) or frames[0] != b"" or len(frames[-2]) != 8:
            return self._ignored("replay", frames, now_s)
        stream = self.view.stream
        if frames[-2] == END_SEQ and frames[-1] == b"":
            self.replay_ended = True
            return self.view.perform(stream.replay_ended(now_s))
        return self.view.perform(stream.replayed(int.from_bytes(frames[-2], "big"), frames[-1], now_s))

    def _status(self, frames: Frames, now_s: float) -> list[Request]:
        try:
            status = decode_status(frames[-1])
        except ValueError:
            return self._ignored("status", frames, now_s)
        digest = Digest(status.digest_blocks, status.digest_xor)
        requests: list[Request] = []
        if not self.view.busy:  # within a batch no digest is true
            requests = self.view.perform(self.view.stream.status(status.incarnation, status.seq, digest, now_s))
        if self._on_status is not None:
            self._on_status(status)
        return requests

    def _snapshot_part(self, frames: Frames, now_s: float) -> list[Request]:
        if len(frames) != 2:
            return self._ignored("snapshot", frames, now_s)
        self.view.stream.progress(now_s)
        if self._header is None:
            try:
                self._header = decode_snapshot_header(frames[1])
            except ValueError:  # every error of msgspec and of UTF-8 is one
                return self._ignored("snapshot", frames, now_s)
        else:
            self._snapshot.append(frames[1])
            self._snapshot_bytes += len(frames[1])
            if self._snapshot_bytes > MAX_SNAPSHOT_BYTES:
                self.asked("snapshot")
                self._ignored("snapshot", frames, now_s)
                requests = self.view.perform(self.view.stream.snapshot_oversized())
                if self.view.inexact == OVERSIZED and not self._oversized_logged:
                    self._oversized_logged = True
                    log.warning(
                        "%s: its snapshot is larger than %d bytes; following only changes from now on",
                        self.view.name,
                        MAX_SNAPSHOT_BYTES,
                    )
                return requests
        header, payloads = self._header, self._snapshot
        if len(payloads) < header.batches:
            return []
        self.asked("snapshot")
        if not self._model_given:
            self.view.resolver.naming.model = header.model
        return self.view.perform(self.view.stream.snapshot(header.incarnation, header.seq, payloads, now_s))

    def _ignored(self, socket: str, frames: Frames, now_s: float) -> list[Request]:
        self._strange += 1
        if now_s >= self._strange_after_s:
            sizes = [len(frame) for frame in frames[:8]]
            log.warning(
                "%s: a message on the %s socket has frames of %s bytes; ignored, as %d in all",
                self.view.name,
                socket,
                sizes,
                self._strange,
            )
            self._strange_after_s = now_s + STRANGE_PAUSE_S
        return []
