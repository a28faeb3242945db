"""One replica's cache as its frames tell it, from sockets or a recording, without any I/O."""

import logging
import math
from collections.abc import Callable, Generator, Iterable, Iterator

from events.cache.changes import Change, Cleared, Removed
from events.cache.pool import Digest
from events.cache.resolver import Resolver
from events.cache.slices import SLICE_BLOCKS, blocks_of, slices
from events.messages import END_SEQ, AllBlocksCleared, BadBatch, Decoder, Event, EventBatch, Frames
from events.native import SnapshotHeader, Status, decode_snapshot_header, read_status
from events.stream.actions import Action, Apply, Compare, Partial, Replay, Reset, Snapshot
from events.stream.foreign_stream import ForeignStream
from events.stream.native_stream import OVERSIZED
from events.stream.stream import Stream

log = logging.getLogger(__name__)

Request = Replay | Snapshot

MAX_SNAPSHOT_BYTES = 256 * 2**20  # some three million blocks
STRANGE_PAUSE_S = 10.0  # between two lines of the log about messages that are none
SHORT_BYTES = 16 * 1024  # a batch of this size is applied in one piece
SHORTEST_BLOCK_BYTES = 16


class CacheView:
    """Takes frames with the name of the socket they came by; answers with the requests that are to be sent.

    `on_change` gets every change of keys, `on_action` every action after it was carried out (with the decoded batch for
    Apply, None otherwise); both are called in the stream's order.

    `sliced`: apply long batches in slices. While the view is `busy` it may be given nothing but statuses, until `go_on`
    has done the rest; then `on_action` gets no batches, and a cleared cache is told of as removed blocks first.
    """

    def __init__(
        self,
        name: str,
        stream: Stream | None = None,
        resolver: Resolver | None = None,
        *,
        skim: bool = False,
        sliced: bool = False,
        on_change: Callable[[Change], None] | None = None,
        on_action: Callable[[Action, EventBatch | None], None] | None = None,
    ) -> None:
        self.name = name
        self.stream: Stream = stream or ForeignStream()
        self.resolver = resolver or Resolver(native=self.stream.native)
        self.decoder = Decoder(skim=skim)
        self.on_status: Callable[[Status], None] | None = None
        self._on_change = on_change
        self._on_action = on_action
        self._sliced = sliced
        self._rest: Iterator[int] | None = None
        self._requests: list[Request] = []
        self.may_be_cleared = False  # the replica was asked to clear its cache, and no event says so yet
        self.replay_ended = False  # no reply to the last replay request can still come
        self._header: SnapshotHeader | None = None
        self._snapshot: list[bytes] = []
        self._snapshot_bytes = 0
        self._model_given = bool(self.resolver.naming.model)
        self._oversized_logged = False
        self._strange = 0  # messages that are none
        self._strange_after_s = -math.inf
        self._takers = {
            "events": self._event,
            "replay": self._replayed,
            "status": self._status,
            "snapshot": self._snapshot_part,
        }

    # ---- frames

    def receive(self, kind: str, frames: Frames, now_s: float) -> list[Request]:
        """Take a message by its socket, or a mark: "connected", "disconnected", "tick" or "standstill"."""
        if (taker := self._takers.get(kind)) is not None:
            return taker(frames, now_s)
        stream = self.stream
        if kind == "disconnected":
            stream.disconnected()
        marks = {"connected": stream.connected, "tick": stream.tick, "standstill": stream.stood_still}
        return self.perform(marks[kind](now_s)) if kind in marks else []  # other kinds are a later version's

    def asked(self, socket: str) -> None:
        """Note a new request: earlier answers belong to an older one."""
        if socket == "replay":
            self.replay_ended = False
        else:
            self._header, self._snapshot, self._snapshot_bytes = None, [], 0

    def _event(self, frames: Frames, now_s: float) -> list[Request]:
        if len(frames) != 3 or len(frames[1]) != 8:
            return self._ignored("events", frames, now_s)
        return self.perform(self.stream.live(int.from_bytes(frames[1], "big"), frames[2], now_s))

    def _replayed(self, frames: Frames, now_s: float) -> list[Request]:
        """`[b"", topic, seq, payload]`, or before vLLM 0.26 without the topic."""
        if len(frames) not in (3, 4) or frames[0] != b"" or len(frames[-2]) != 8:
            return self._ignored("replay", frames, now_s)
        if frames[-2] == END_SEQ and frames[-1] == b"":
            self.replay_ended = True
            return self.perform(self.stream.replay_ended(now_s))
        return self.perform(self.stream.replayed(int.from_bytes(frames[-2], "big"), frames[-1], now_s))

    def _status(self, frames: Frames, now_s: float) -> list[Request]:
        try:
            status = read_status(frames)
        except ValueError:
            return self._ignored("status", frames, now_s)
        digest = Digest(status.digest_blocks, status.digest_xor)
        requests: list[Request] = []
        if not self.busy:  # within a batch no digest is true
            requests = self.perform(self.stream.status(status.incarnation, status.seq, digest, now_s, status.doubt))
        if self.on_status is not None:
            self.on_status(status)
        return requests

    def _snapshot_part(self, frames: Frames, now_s: float) -> list[Request]:
        if len(frames) != 2:
            return self._ignored("snapshot", frames, now_s)
        self.stream.progress(now_s)
        if self._header is None:
            try:
                self._header = decode_snapshot_header(frames[1])
            except ValueError:  # every error of msgspec and of UTF-8 is one
                return self._ignored("snapshot", frames, now_s)
        else:
            self._snapshot.append(frames[1])
            self._snapshot_bytes += len(frames[1])
        header, payloads = self._header, self._snapshot
        if self._snapshot_bytes > MAX_SNAPSHOT_BYTES:
            self.asked("snapshot")
            self._ignored("snapshot", frames, now_s)
            requests = self.perform(self.stream.snapshot_oversized())
            if self.inexact == OVERSIZED and not self._oversized_logged:
                self._oversized_logged = True
                told = "%s: its snapshot is larger than %d bytes; following only changes from now on"
                log.warning(told, self.name, MAX_SNAPSHOT_BYTES)
            return requests
        if len(payloads) < header.batches:
            return []
        self.asked("snapshot")
        naming = self.resolver.naming
        naming.named_by = header.model
        if not self._model_given:
            naming.model = header.model
        return self.perform(self.stream.snapshot(header.incarnation, header.seq, payloads, now_s, header.doubt))

    def _ignored(self, socket: str, frames: Frames, now_s: float) -> list[Request]:
        self._strange += 1
        if now_s >= self._strange_after_s:
            told = "%s: a message on the %s socket has frames of %s bytes; ignored, as %d in all"
            log.warning(told, self.name, socket, [len(frame) for frame in frames[:8]], self._strange)
            self._strange_after_s = now_s + STRANGE_PAUSE_S
        return []

    # ---- actions

    @property
    def busy(self) -> bool:
        """True while slices are left to do."""
        return self._rest is not None

    @property
    def inexact(self) -> str | None:
        if self.resolver.inexact is not None:
            return self.resolver.inexact
        if self._rest is not None:
            return "a long batch is being applied"
        if self.may_be_cleared:
            return "the replica was asked to clear its cache, and no event has shown yet whether it did"
        return None if self.stream.exact else self.stream.doubt

    def perform(self, actions: Iterable[Action]) -> list[Request]:
        """Carry out the actions; return the requests that the caller has to send."""
        assert self._rest is None, "the last batch is not applied yet"
        if self._sliced and isinstance(actions, list) and len(actions) == 1:  # the usual case: one short batch
            action = actions[0]
            if isinstance(action, Apply) and len(action.payload) <= SHORT_BYTES and self._apply_short(action):
                if self._on_action is not None:
                    self._on_action(action, None)
                if not self._is_doubted:
                    return []
                actions = self._doubted(self.stream.last_seq)
        self._rest = self._steps(actions)
        return self.go_on()

    def go_on(self) -> list[Request]:
        """Apply one slice of the pending batch, or all of it; return the resulting requests."""
        rest, self._rest = self._rest, None
        blocks = 0
        for done in rest or ():
            blocks += done
            if self._sliced and blocks >= SLICE_BLOCKS:
                self._rest = rest
                break
        requests, self._requests = self._requests, []
        return requests

    def _steps(self, actions: Iterable[Action]) -> Iterator[int]:
        """Carry out the actions; yield now and then about how many blocks that took."""
        for action in actions:
            batch = None
            if isinstance(action, Apply):
                if self._sliced and len(action.payload) <= SHORT_BYTES and self._apply_short(action):
                    yield len(action.payload) // SHORTEST_BLOCK_BYTES
                else:
                    batch = yield from self._apply(action)
                if self._is_doubted:
                    yield from self._steps(self._doubted(action.seq))
            elif isinstance(action, Reset):
                self.decoder.restart()
                self.resolver.restarted()
                yield from self._emptied(self.resolver.reset())
            elif isinstance(action, Partial) and self.stream.must_forget:
                yield from self._emptied(self.resolver.lose())
            elif isinstance(action, Compare) and self.resolver.digest() == action.digest:
                self.stream.matched()
                self.resolver.capacity.forgive()
            elif isinstance(action, Compare):
                # If its blocks are more than are kept, `inexact` says so: a snapshot would not help.
                if not self.resolver.capacity.is_too_small_for(action.digest.blocks):
                    yield from self._steps(self.stream.mismatch())
            elif isinstance(action, Replay | Snapshot):
                self._requests.append(action)
            if self._on_action is not None:
                self._on_action(action, batch)

    def _apply_short(self, action: Apply) -> bool:
        """False, and nothing is done, where the batch clears the cache or cannot be read."""
        try:
            events = self.decoder.decode(action.payload).events
        except BadBatch:
            return False
        if _clear(events):
            return False
        self._changed(self.resolver.apply(events))
        return True

    def _apply(self, action: Apply) -> Generator[int, None, EventBatch | None]:
        """Return the batch, unless it is read in slices or cannot be read."""
        batch, clears = None, False
        try:
            if self._sliced:
                parts = slices(self.decoder.events(action.payload, self._name_of(action)))
            else:
                batch = self.decoder.decode(action.payload, self._name_of(action))
                parts = iter([batch.events])
            for events in parts:
                if not _clear(events):
                    self._changed(self.resolver.apply(events))
                    yield sum(map(blocks_of, events))
                    continue
                clears = True
                for event in events:
                    if isinstance(event, AllBlocksCleared):
                        self.resolver.stats.cleared += 1
                        self.may_be_cleared = False
                        yield from self._emptied(self.resolver.reset())
                    else:
                        self._changed(self.resolver.apply([event]))
        except BadBatch as error:
            yield from self._steps(self.stream.refused(str(error)))
            return None
        if clears:
            self.stream.cleared(action.seq)
        return batch

    @property
    def _is_doubted(self) -> bool:
        """True if a batch may have shown more than its changes: a loss, or that an earlier one no longer matters."""
        if self.stream.partial is not None or self.resolver.complete:
            return True
        return self.resolver.lost is not None and self.stream.must_forget

    def _doubted(self, seq: int) -> list[Action]:
        if self.resolver.lost is not None and self.stream.must_forget:
            return self.stream.refused(self.resolver.lost)
        if self.resolver.complete:
            self.resolver.complete = False
            self.stream.filled(seq)
        return []

    def _emptied(self, cleared: Cleared) -> Iterator[int]:
        if not self._sliced:
            self._changed([cleared])
            return
        for medium, group, keys in cleared.held:
            while keys:
                part = [keys.pop() for _ in range(min(len(keys), SLICE_BLOCKS))]
                self._changed([Removed(medium, part, group)])
                yield len(part)
        self._changed([Cleared()])

    def _name_of(self, action: Apply) -> str:
        return f"batch {action.seq} of {self.name}" if action.seq >= 0 else f"a snapshot batch of {self.name}"

    def _changed(self, changes: Iterable[Change]) -> None:
        if self._on_change is not None:
            for change in changes:
                self._on_change(change)


def _clear(events: Iterable[Event]) -> bool:
    return any(isinstance(event, AllBlocksCleared) for event in events)
