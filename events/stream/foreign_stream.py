"""The stream of another engine: gaps are repaired by replays, and an idle stream is probed."""

from events.stream.actions import Action
from events.stream.states import Repair, Row, State, StreamConfig
from events.stream.stream import Stream

DRAINED_S = 0.2  # after this long without a batch, all that was sent during a standstill has been read


class ForeignStream(Stream):
    native = False
    silence = "the replay socket does not answer"

    def __init__(self, config: StreamConfig | None = None) -> None:
        super().__init__(config)
        self._replayed_all = False  # on this connection a replay from 0 has been answered
        self._probe_s = self.config.probe_after_s

    def connected(self, now_s: float) -> list[Action]:
        self._heard(now_s)
        self._offline = self._replayed_all = self._tail_doubted = False
        self._held.clear()
        if self.next_seq is None:
            return self._synchronize(now_s)
        self.stats.reconnects += 1
        if self.config.can_replay:
            return self._ask_replay(State.PROOF if self._recent else State.GAP, now_s)
        return self._declare("reconnected without a replay socket: batches may be missing")

    def live(self, seq: int, payload: bytes, now_s: float) -> list[Action]:
        self._probe_s = self.config.probe_after_s
        if self._tail_doubted and not self.config.can_replay:
            # After a pause it is no leftover of the standstill: if it is the next one, none was lost before it.
            self._tail_doubted = self._heard_s is None or now_s - self._heard_s < DRAINED_S
        return super().live(seq, payload, now_s)

    def stood_still(self, now_s: float) -> list[Action]:
        if self._offline or self._heard_s is None:
            return []
        self._tail_doubted, self._repair.proves_tail = True, False
        self._heard_s = now_s
        return self._ask_replay(State.PROBE, now_s) if self._may_prove_tail else []

    def resync(self, reason: str, now_s: float) -> list[Action]:
        self._state = State.FOLLOWING
        self._held.clear()
        actions = self._forget(reason)
        self._declare(reason)
        return actions if self._offline else actions + self._synchronize(now_s)

    def _prove(self, seq: int, payload: bytes, now_s: float) -> list[Action]:
        """The first batch should be the last one applied before the reconnect."""
        assert self.next_seq is not None
        if seq < self.next_seq:
            if seq in self._recent:
                self._state = State.GAP
            return self._overlap(seq, payload, now_s)
        self._state = State.GAP
        reset = self._forget("after a reconnect the last batch known is no longer replayed")
        return reset + self._fill(seq, payload, now_s)

    def _fill(self, seq: int, payload: bytes, now_s: float) -> list[Action]:
        if self.next_seq is not None and seq < self.next_seq:
            return self._overlap(seq, payload, now_s)
        self._replies(now_s)
        if self._state is State.JOIN:
            self._state = State.GAP
        actions = self._skip_to_held(before=seq)  # live batches are not lost
        actions += self._go_to(seq)
        self.stats.replayed_batches += 1
        return actions + self._apply(seq, payload)

    def _nothing_to_replay(self, now_s: float) -> list[Action]:
        self.next_seq = 0
        self.partial = "nothing published yet, as far as the replay socket tells"
        return self._filled(now_s)

    def _go_on(self, replay: Repair, now_s: float) -> list[Action]:
        actions: list[Action] = []
        self._replayed_all = self._replayed_all or replay.start == 0
        if self.last_seq < replay.missing_to:  # asked after the gap was seen, so it exists nowhere any more
            actions += self._lose(min(self._held, default=replay.missing_to + 1))
        if replay.replies and self.partial is not None and not self._replayed_all:
            # It did not answer when we joined; what it still has may make us exact.
            return actions + self._forget("the replay socket answers now") + self._ask_replay(State.JOIN, now_s)
        return actions + self._drain(now_s)

    def _give_up(self, now_s: float) -> list[Action]:  # noqa: ARG002
        probed, self._state = self._state is State.PROBE, State.FOLLOWING
        if probed:
            self._silent = True
            return []
        return self._declare("the replay socket does not answer") + self._skip_to_held()

    @property
    def _may_prove_tail(self) -> bool:
        if not self._tail_doubted or self._silent or self.next_seq is None or not self.config.can_replay:
            return False
        return self._state is State.FOLLOWING or (self._state is State.PROBE and not self._repair.proves_tail)

    def _synchronize(self, now_s: float) -> list[Action]:
        return self._ask_replay(State.JOIN, now_s) if self.config.can_replay else []

    def _probe(self, now_s: float) -> list[Action]:
        """Look whether a stream that was idle for long has lost its tail."""
        if self._may_prove_tail:
            return self._ask_replay(State.PROBE, now_s)
        if self._heard_s is None or not self.config.can_replay or now_s - self._heard_s < self._probe_s:
            return []
        self._probe_s = min(2 * self._probe_s, self.config.probe_at_most_s)
        return self._ask_replay(State.JOIN if self.next_seq is None else State.PROBE, now_s)

    def _repair_gap(self, last: int, now_s: float) -> list[Action]:
        if self.config.can_replay:
            return self._ask_replay(State.GAP, now_s, missing_to=last)
        return self._skip_to_held()

    def _restart(self, reason: str, seq: int | None, payload: bytes, now_s: float) -> list[Action]:
        actions = self._forget_publisher(reason)
        if self.config.can_replay:
            if seq is not None:
                self._hold(seq, payload)
            return actions + self._synchronize(now_s)
        return actions if seq is None else actions + self._join(seq) + self._apply(seq, payload)


F = ForeignStream
# fmt: off
ForeignStream.table = {
    #                    live       replayed   replay_ended          snapshot  tick
    State.FOLLOWING: Row(F._follow, F._void,   F._void,              F._void,  F._probe),
    State.PROBE:     Row(F._follow, F._fill,   F._filled,            F._void,  F._look_after),
    State.JOIN:      Row(F._wait,   F._fill,   F._nothing_to_replay, F._void,  F._look_after),
    State.PROOF:     Row(F._wait,   F._prove,  F._filled,            F._void,  F._look_after),
    State.GAP:       Row(F._wait,   F._fill,   F._filled,            F._void,  F._look_after),
}
# fmt: on
