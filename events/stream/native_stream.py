"""The stream of a warmroute replica or mirror: its status proves the view, and snapshots repair what replays cannot."""

from collections.abc import Iterable

from events.cache.pool import Digest
from events.native import SURE, Doubt
from events.stream.actions import Action, Apply, Compare, Partial, Reset, Snapshot
from events.stream.states import Repair, Row, State, StreamConfig
from events.stream.stream import Stream

OVERSIZED = "the replica's snapshot is too long to be read"
MAX_OVERSIZED = 2  # after two in a row, the next one would be as long


class NativeStream(Stream):
    native = True
    silence = "no status is heard"

    def __init__(self, config: StreamConfig | None = None) -> None:
        super().__init__(config)
        self._unproven = False  # reconnected, and not yet shown to be the same incarnation
        self._last_live = -1
        self._late = False  # the live batch has a higher number than those before it on this connection
        self._oversized = 0  # snapshots in a row
        self._snapshot_after_s = 0.0
        self._snapshot_wait_s = self.config.snapshot_interval_s
        self._status: tuple[int, Digest] | None = None
        self._status_s = 0.0
        self._behind_since_s: float | None = None
        self._told, self._told_at = SURE, -1  # the sender's own doubt, and its last batch then
        self._refuted: Doubt | None = None  # since the last snapshot, by a full pool

    @property
    def doubt(self) -> str | None:
        if self._state is State.OVERSIZED:
            return OVERSIZED
        behind = None if self._behind_since_s is None else "the replica has sent more than has come"
        told = None if self._told.provable and self._told == self._refuted else self._told.reason
        return super().doubt or told or behind

    @property
    def heard_s(self) -> float | None:
        return None if self._heard_s is None else max(self._heard_s, self._status_s)

    @property
    def must_forget(self) -> bool:
        return self._state is State.OVERSIZED or self._told != SURE

    @property
    def lag_batches(self) -> int:
        if self.next_seq is None or self._status is None:
            return super().lag_batches
        return max(super().lag_batches, self._status[0] - self.last_seq)

    # ---- facts

    def connected(self, now_s: float) -> list[Action]:
        self._heard(now_s)
        self._offline = self._silent = False
        self._last_live = -1
        self._oversized = 0
        self._snapshot_after_s = self._status_s = now_s
        self._snapshot_wait_s = self.config.snapshot_interval_s
        if self.next_seq is not None:
            self.stats.reconnects += 1
            self._unproven = bool(self._recent)
        return self._ask_snapshot(now_s)

    def live(self, seq: int, payload: bytes, now_s: float) -> list[Action]:
        self._late, self._last_live = seq > self._last_live, seq
        return super().live(seq, payload, now_s)

    def status(self, incarnation: int, seq: int, digest: Digest, now_s: float, doubt: Doubt = SURE) -> list[Action]:
        self._silent = False
        self._status_s = now_s
        if doubt.reason or self._told_at <= seq <= self.last_seq:  # it is sure of what has been applied
            self._told, self._told_at = doubt, seq
        known, self.incarnation = self.incarnation, incarnation
        if known is not None and incarnation != known:
            return self._restart("the replica has a new incarnation", None, b"", now_s)
        if self.next_seq is None or self._state is not State.FOLLOWING:
            return []
        self._status = (seq, digest)
        if seq < self.next_seq:
            return self._compare()
        if self._behind_since_s is None:
            self._behind_since_s = now_s
        return []

    def filled(self, seq: int) -> None:
        super().filled(seq)
        self._refuted = self._told

    def progress(self, now_s: float) -> None:
        if self._awaits_snapshot:
            self._repair.deadline_s = now_s + self.config.repair_timeout_s

    def snapshot_oversized(self) -> list[Action]:
        if not self._awaits_snapshot:
            return []
        self._oversized += 1
        if self._oversized < MAX_OVERSIZED:
            return []
        self._state = State.OVERSIZED
        return self._declare(OVERSIZED) + self._skip_to_held()

    def resync(self, reason: str, now_s: float) -> list[Action]:
        actions = self._declare(reason)
        if self._offline or self._awaits_snapshot:
            return actions
        self._oversized = 0
        return actions + self._ask_snapshot(now_s)

    def matched(self) -> None:
        self._snapshot_wait_s = self.config.snapshot_interval_s

    def refused(self, reason: str) -> list[Action]:
        self._back_off()
        return super().refused(reason)

    def delayed(self, by_s: float) -> None:
        super().delayed(by_s)
        self._status_s += by_s
        if self._behind_since_s is not None:
            self._behind_since_s += by_s

    def _become_exact(self) -> None:
        super()._become_exact()
        self._oversized = 0
        if self._state is State.OVERSIZED:
            self._state = State.FOLLOWING

    # ---- batches

    def _old(self, seq: int, payload: bytes, now_s: float) -> list[Action]:
        if self._late:  # the snapshot has it already
            self.stats.duplicates += 1
            return []
        return super()._old(seq, payload, now_s)

    def _apply(self, seq: int, payload: bytes) -> list[Action]:
        if seq == 0:
            self._behind_since_s = None
        actions = super()._apply(seq, payload)
        return actions if self._status is None else actions + self._compare()

    def _compare(self) -> list[Action]:
        """Compare digests at the batch for which the last status was true."""
        if self._status is None or self._status[0] > self.last_seq:
            return []
        (seq, digest), self._status = self._status, None
        self._behind_since_s = None
        if seq < self.last_seq or self.partial is not None:
            return []
        self.stats.digests_compared += 1
        return [Compare(digest)]

    # ---- a replay

    def _fill(self, seq: int, payload: bytes, now_s: float) -> list[Action]:
        assert self.next_seq is not None
        if seq < self.next_seq:
            self._unproven = self._unproven and seq not in self._recent
            return self._overlap(seq, payload, now_s)
        self._replies(now_s)
        if self._unproven or seq != self.next_seq:
            return self._ask_snapshot(now_s)
        self.stats.replayed_batches += 1
        return self._apply(seq, payload)

    def _go_on(self, replay: Repair, now_s: float) -> list[Action]:
        self._unproven = False
        return self._ask_snapshot(now_s) if self.last_seq < replay.missing_to else self._drain(now_s)

    # ---- a snapshot

    @property
    def _awaits_snapshot(self) -> bool:
        return self._state in {State.SNAPSHOT, State.PAUSE}

    def _take(self, incarnation: int, seq: int, payloads: Iterable[bytes], now_s: float, doubt: Doubt) -> list[Action]:
        self.incarnation, self._told, self._told_at, self._refuted = incarnation, doubt, seq, None
        self.stats.snapshots += 1
        self._state = State.FOLLOWING
        self._become_exact()
        self._unproven = False
        self._status = self._behind_since_s = None
        self.next_seq = seq + 1
        self._recent.clear()
        self._held.release_to(seq)
        begin: list[Action] = [Reset("snapshot"), *[Partial(doubt.reason)] * (doubt != SURE)]
        return [*begin, *(Apply(-1, payload) for payload in payloads), *self._drain(now_s)]

    def _ask_snapshot(self, now_s: float) -> list[Action]:
        self._behind_since_s = None
        self._held.clear()  # the snapshot will cover them, or they are of an earlier incarnation
        if now_s < self._snapshot_after_s:  # the last one did not help: no storm of them
            self._back_off()
            self._state = State.PAUSE
            self._repair = Repair(self._snapshot_after_s, attempts=0)
            return []
        if now_s >= self._snapshot_after_s + self._snapshot_wait_s:
            self._snapshot_wait_s = self.config.snapshot_interval_s
        self._snapshot_after_s = now_s + self._snapshot_wait_s
        self._state = State.SNAPSHOT
        self._repair = Repair(now_s + self.config.repair_timeout_s)
        self.stats.repairs += self.next_seq is not None
        return [Snapshot()]

    def _ask_again(self, now_s: float) -> list[Action]:
        if self._state is State.GAP:
            return super()._ask_again(now_s)
        self._state = State.SNAPSHOT
        self._snapshot_after_s = now_s + self._snapshot_wait_s
        return [Snapshot()]

    def _give_up(self, now_s: float) -> list[Action]:
        if self._state is State.GAP:
            return self._ask_snapshot(now_s)
        self._state = State.FOLLOWING  # while it is partial, `_watch` goes on asking
        self._snapshot_after_s = now_s + self.config.repair_timeout_s * 2**self._repair.attempts
        return self._declare("the replica does not answer a snapshot request") + self._skip_to_held()

    def _back_off(self) -> None:
        self._snapshot_wait_s = min(2 * self._snapshot_wait_s, self.config.snapshot_interval_at_most_s)

    # ---- without a repair

    def _watch(self, now_s: float) -> list[Action]:
        self._listen(now_s)
        if self._heard_s is None:
            return []
        if self.partial is not None and now_s >= self._snapshot_after_s:
            return self._ask_snapshot(now_s)
        if self._behind_since_s is not None and now_s - self._behind_since_s >= self.config.behind_grace_s:
            assert self._status is not None
            self._behind_since_s = None
            return self._gap(self._status[0], now_s)
        return []

    def _listen(self, now_s: float) -> list[Action]:
        if self._heard_s is not None and now_s - self._status_s >= self.config.status_timeout_s:
            self._silent = True
        return []

    def _repair_gap(self, last: int, now_s: float) -> list[Action]:
        if self._state is State.OVERSIZED:
            return self._skip_to_held()
        if self.config.can_replay:
            return self._ask_replay(State.GAP, now_s, missing_to=last)
        return self._ask_snapshot(now_s)

    def _restart(self, reason: str, seq: int | None, payload: bytes, now_s: float) -> list[Action]:  # noqa: ARG002
        self._unproven = False
        self._oversized = 0
        return self._forget_publisher(reason) + self._ask_snapshot(now_s)


N = NativeStream
# fmt: off
NativeStream.table = {
    #                    live       replayed  replay_ended  snapshot  tick
    State.FOLLOWING: Row(N._follow, N._void,  N._void,      N._void,  N._watch),
    State.GAP:       Row(N._wait,   N._fill,  N._filled,    N._void,  N._look_after),
    State.SNAPSHOT:  Row(N._wait,   N._void,  N._void,      N._take,  N._look_after),
    State.PAUSE:     Row(N._wait,   N._void,  N._void,      N._take,  N._look_after),
    State.OVERSIZED: Row(N._follow, N._void,  N._void,      N._void,  N._listen),
}
# fmt: on
