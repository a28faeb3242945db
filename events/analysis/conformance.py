"""Grades a stream against docs/wire.md, without a socket: messages in, findings out.

Messages are given in the order of their arrival, and batches once more in the order in which a view has applied them.
"""

from typing import Literal

from msgspec import Struct
from xxhash import xxh3_64_intdigest

from events.analysis import points
from events.messages import END_SEQ, BadBatch, BlockRemoved, BlockStored, Decoder, RejectedEvent, UnknownEvent

REMEMBERED_BATCHES = 200_000


class Finding(Struct):
    point: points.Point
    checked: int = 0
    failed: int = 0
    example: str | None = None  # the first failure

    @property
    def state(self) -> Literal["pass", "fail", "not seen"]:
        return "fail" if self.failed else "pass" if self.checked else "not seen"


class _Replay(Struct):
    start: int | None  # None: not known, in a recording
    newest: int | None  # the last live number when it was asked for
    first: int | None = None
    last: int | None = None


class Conformance:
    def __init__(self, *, can_replay: bool) -> None:
        self.can_replay = can_replay
        self.messages = 0  # live or replayed, whatever is in them
        self.batches = 0
        self.events = 0
        self.notes: list[str] = []
        self._findings = {point.name: Finding(point) for point in points.POINTS}
        self._topic: bytes | None = None
        self._replay_frames: int | None = None
        self._begin()
        self.forget()

    def _begin(self) -> None:
        self._digests: dict[int, int] = {}
        self._first_live: int | None = None
        self._last_live: int | None = None
        self._replay: _Replay | None = None
        self._buffered: tuple[int, int] | None = None  # the oldest and the newest number of the last replay
        # A restart would explain this: it is a failure only if the next live batch shows that there was none.
        self._suspected: list[tuple[str, points.Verdict, str | None]] = []

    @property
    def replaying(self) -> bool:
        return self._replay is not None

    def live(self, frames: list[bytes]) -> None:
        self.messages += 1
        if self._topic is None and len(frames) == 3:
            self._topic = frames[0]
        where = f"after batch {self._last_live}" if self._last_live is not None else None
        for point, check in points.LIVE_CHECKS.items():
            self._grade(point, check(frames, self._topic or b""), where)
        if points.sequence_frame(frames, b"") is points.OK:
            self._order(int.from_bytes(frames[1], "big"), frames[2])

    def _order(self, seq: int, payload: bytes) -> None:
        last, first = self._last_live, self._first_live
        if last is None or first is None or seq > last:
            self._last_live = seq
            self._first_live = seq if first is None else first
            self._grade("sequence in order", points.SKIP if last is None else points.OK)
            self._confirm()
            self._compare(seq, payload)
            return
        known = self._digests.get(seq)
        if known == xxh3_64_intdigest(payload):
            self._grade("sequence in order", f"batch {seq} came again after {last}")
        elif known is None and seq > first:
            self._grade("sequence in order", f"batch {seq} came after {last}")
        else:
            self.notes.append(f"a restart: the sequence went back from {last} to {seq} with other content")
            self._begin()
            self._order(seq, payload)

    def replay_asked(self, start: int | None) -> None:
        self._replay = _Replay(start, self._last_live)

    def replayed(self, frames: list[bytes]) -> None:
        replay = self._replay = self._replay or _Replay(None, self._last_live)
        verdict = self._layout(frames)
        self._grade("replay layout", verdict)
        if verdict is not points.OK:
            return
        if frames[-2] == END_SEQ:
            self._grade("replay ends", points.OK)
            self._suspect("replay honours start", self._honoured(replay))
            if replay.first is not None and replay.last is not None:
                self._buffered = (replay.first, replay.last)
            self._replay = None
            return
        self.messages += 1
        seq, payload = int.from_bytes(frames[-2], "big"), frames[-1]
        if replay.last is not None:
            self._grade("replay in order", points.OK if seq == replay.last + 1 else f"batch {seq} after {replay.last}")
        replay.first = seq if replay.first is None else replay.first
        replay.last = seq
        self._compare(seq, payload)

    def replay_silent(self) -> None:
        """The replay socket does not answer, or stopped before the end marker."""
        replay = self._replay or _Replay(None, None)
        got = "nothing came" if replay.last is None else f"batch {replay.last} was the last to come"
        self._grade("replay ends", f"asked for batches from {replay.start or 0}: {got}, and no end marker")
        self.can_replay = False
        self._replay = None

    def _compare(self, seq: int, payload: bytes) -> None:
        """The same number, live and replayed, is the same batch."""
        digest = xxh3_64_intdigest(payload)
        known = self._digests.setdefault(seq, digest)
        if self._replay is not None or known != digest:
            live = self._first_live is not None and seq >= self._first_live
            other = "other bytes live and replayed (or the publisher restarted unseen)"
            self._suspect(
                "replay equals live",
                points.SKIP if not live else points.OK if known == digest else other,
                f"batch {seq}",
            )
        if len(self._digests) > REMEMBERED_BATCHES:
            del self._digests[next(iter(self._digests))]

    def _layout(self, frames: list[bytes]) -> points.Verdict:
        sizes = [len(frame) for frame in frames]
        if len(frames) not in (3, 4) or frames[0] != b"" or sizes[-2] != 8:
            return f"frames of {sizes} bytes"
        if self._replay_frames is None:
            self._replay_frames = len(frames)
            if len(frames) == 3:
                self.notes.append("replies have no topic frame, as before vLLM 0.26")
        if len(frames) != self._replay_frames:
            return f"{len(frames)} frames, and {self._replay_frames} in those before"
        if frames[-2] == END_SEQ:
            marker = frames[-1] == b"" and (len(frames) == 3 or frames[1] == b"")
            return points.OK if marker else f"the end marker's other frames are not empty: frames of {sizes} bytes"
        if len(frames) == 4 and self._topic is not None and frames[1] != self._topic:
            return f"the reply's topic is {frames[1]!r}, live it is {self._topic!r}"
        return points.OK

    def _honoured(self, replay: _Replay) -> points.Verdict:
        start, first, newest = replay.start, replay.first, replay.newest
        if start is None:
            return points.SKIP
        if first is None or replay.last is None:
            empty = newest is not None and start <= newest
            return f"asked for {start}: nothing came, though {newest} had been sent" if empty else points.OK
        if first < start:
            return f"asked for {start}: the first reply is {first}"
        if newest is not None and replay.last < newest:
            return f"asked for {start}: the last reply is {replay.last}, though {newest} had been sent"
        if first == start:
            return points.OK
        if self._buffered is None or newest is None:  # earlier batches may be no longer buffered
            return points.SKIP
        oldest, last = self._buffered
        oldest += max(0, newest - last)  # those that came since may have pushed out as many
        late = f"asked for {start}: the first reply is {first}, though {oldest} is buffered"
        return late if first > oldest else points.SKIP

    def forget(self) -> None:
        self._history = points.History()
        self._decoder = Decoder()
        self._next: int | None = None

    def applied(self, seq: int, payload: bytes) -> None:
        """Judge the next batch; those that the view left out came neither live nor replayed."""
        if self._next is None:
            self._history.complete = seq == 0
        elif seq > self._next:
            missing = f"batch {seq - 1}" if seq - self._next == 1 else f"batches {self._next} to {seq - 1}"
            how = "live or replayed" if self.can_replay else "and there is no replay socket to ask"
            self._grade("sequence without holes", f"{missing} never came, {how}")
            self._history.complete = False
        else:
            self._grade("sequence without holes", points.OK)
        self._next = seq + 1
        where = f"batch {seq}"
        fields_before = self._decoder.unknown_fields.copy()
        try:
            batch = self._decoder.decode(payload, where)
        except BadBatch as error:
            self._grade("batches readable", str(error))
            self._history.complete = False
            return
        self._grade("batches readable", points.OK)
        strange = self._decoder.unknown_fields - fields_before
        self._grade("known fields", f"field {next(iter(strange))}" if strange else points.OK, where)
        for point, check in points.BATCH_CHECKS.items():
            self._grade(point, check(self._history, batch), where)
        self._history.ts, self._history.rank = batch.ts, batch.data_parallel_rank
        self._history.batches += 1
        self.batches += 1
        self.events += len(batch.events)
        for event in batch.events:
            if isinstance(event, BlockStored):
                for point, check_store in points.STORE_CHECKS.items():
                    self._grade(point, check_store(self._history, event), where)
            elif isinstance(event, BlockRemoved):
                self._grade("removals matched", points.removals_matched(self._history, event), where)
            elif isinstance(event, RejectedEvent | UnknownEvent):
                self._history.complete = False
            self._history.add(event)

    def findings(self) -> list[Finding]:
        """Judge the remaining checks, and return the grade of each point."""
        self._confirm()
        return list(self._findings.values())

    def _suspect(self, point: str, verdict: points.Verdict, where: str | None = None) -> None:
        if verdict in (points.OK, points.SKIP):
            self._grade(point, verdict, where)
        else:
            self._suspected.append((point, verdict, where))

    def _confirm(self) -> None:
        suspected, self._suspected = self._suspected, []
        for point, verdict, where in suspected:
            self._grade(point, verdict, where)

    def _grade(self, point: str, verdict: points.Verdict, where: str | None = None) -> None:
        if verdict == points.SKIP:
            return
        finding = self._findings[point]
        finding.checked += 1
        if verdict is not points.OK:
            finding.failed += 1
            finding.example = finding.example or (f"{where}: {verdict}" if where else verdict)
