"""One replica's batches put in order, without a socket or a clock: facts in, actions out.

`ForeignStream` repairs by replays and `NativeStream` by snapshots, each by a table of states; this is what they share.

A batch has a sequence number but no incarnation, so the same number may mean two different batches. Three rules follow:

* A batch older than expected is a duplicate only if its bytes were seen under that number; otherwise the publisher
  restarted. (After a snapshot of a native replica, batches that it covers may still come in order for the first time.)
* Every replay starts one batch early, at the last one applied: if that comes back with other bytes, or not at all while
  the publisher has nothing newer, the publisher restarted without our seeing it.
* After a reconnect nothing is applied until such a replay (or, from a native replica, a snapshot) has proved that the
  stream is still the same.

What cannot be repaired is never waited for: the state becomes partial, with the reason, until a snapshot, a restart
whose beginning is known, AllBlocksCleared or a full turnover of the cache makes it exact again. Until then the view
holds only what was stored after the loss, so that it claims too little and never too much.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar

from events.cache.pool import Digest
from events.native import SURE, Doubt
from events.stream.actions import Action, Apply, Gap, Partial, Replay, Reset
from events.stream.held import HeldBatches, PayloadMemory
from events.stream.states import IN_ORDER, Repair, Row, State, StreamConfig, StreamStats


class Stream(ABC):
    """A state machine: each input returns actions, to perform in order."""

    native: ClassVar[bool]
    table: ClassVar[dict[State, Row]]
    silence: ClassVar[str]  # why a silent replica is doubted

    def __init__(self, config: StreamConfig | None = None) -> None:
        self.config = config or StreamConfig()
        self.stats = StreamStats()
        self.incarnation: int | None = None
        self.next_seq: int | None = None
        self.partial: str | None = "not synchronized yet"
        self._partial_from = 0  # the first batch after the loss
        self._state = State.FOLLOWING
        self._repair = Repair(0.0)  # counts in the states that await one
        self._replays = False  # the replay socket has replayed something
        self._held = HeldBatches(self.config.max_held_batches, self.config.max_held_bytes)
        self._recent = PayloadMemory(self.config.remembered_batches)
        self._offline = True
        self._tail_doubted = False  # the reader stood still, and no answer has shown yet that nothing was lost
        self._silent = False  # the last probe got no answer, or a native replica's status stays away
        self._heard_s: float | None = None  # None: not connected yet

    # ---- knowledge

    @property
    def exact(self) -> bool:
        """True while everything up to `next_seq` is known and no loss is suspected."""
        return self.doubt is None

    @property
    def doubt(self) -> str | None:
        return self.delay if self.partial is None else self.partial

    @property
    def delay(self) -> str | None:
        """Why the end of the stream may be missing."""
        if self._offline:
            return "not connected"
        if self._state not in IN_ORDER:
            return "a repair is under way"
        if self._tail_doubted:
            return "the reader stood still: the end of the stream may be lost"
        return self.silence if self._silent else None

    @property
    def repairing(self) -> bool:
        """True while an outstanding answer may change the view."""
        return self._state not in {State.FOLLOWING, State.OVERSIZED}

    @property
    def online(self) -> bool:
        """True while the event socket has a connection."""
        return not self._offline

    @property
    def settled(self) -> bool:
        """Connected, and no repair is under way: if it is not exact, it will not become so by waiting."""
        return not self._offline and self._state in IN_ORDER

    @property
    def heard_s(self) -> float | None:
        """The time at which the publisher was heard last; None: not connected yet."""
        return self._heard_s

    @property
    def must_forget(self) -> bool:
        """True if no snapshot will tell what is left of the cache after a loss."""
        return True

    @property
    def lag_batches(self) -> int:
        """Batches that the replica is known to have sent and that are not applied yet."""
        if self.next_seq is None:
            return len(self._held)
        missing_to = self._repair.missing_to if self.repairing else -1
        return max(0, max(missing_to, self._held.highest) - self.last_seq)

    @property
    def last_seq(self) -> int:
        return -1 if self.next_seq is None else self.next_seq - 1

    # ---- facts about any replica

    @abstractmethod
    def connected(self, now_s: float) -> list[Action]:
        """The event socket is connected, for the first time or again; from now on `live` gets nothing sent before."""

    def disconnected(self) -> None:
        """Note a lost connection of the event socket: the view may be out of date."""
        self._offline = True

    def live(self, seq: int, payload: bytes, now_s: float) -> list[Action]:
        self._heard(now_s)
        return self.table[self._state].live(self, seq, payload, now_s)

    def replayed(self, seq: int, payload: bytes, now_s: float) -> list[Action]:
        return self.table[self._state].replayed(self, seq, payload, now_s)

    def replay_ended(self, now_s: float) -> list[Action]:
        return self.table[self._state].replay_ended(self, now_s)

    def tick(self, now_s: float) -> list[Action]:
        """Time passes; without a connection nothing is asked, since the next one starts with a repair."""
        return [] if self._offline else self.table[self._state].tick(self, now_s)

    @abstractmethod
    def resync(self, reason: str, now_s: float) -> list[Action]:
        """Ask for the whole cache again, because a comparison with the replica failed.

        Without a snapshot or a replay, forget the view and learn it again from new events.
        """

    def stood_still(self, now_s: float) -> list[Action]:  # noqa: ARG002
        """Note that the reader read nothing for long: meanwhile, the publisher may have dropped batches."""
        return []

    def delayed(self, by_s: float) -> None:
        """Note a pause of the caller: nothing awaited meanwhile is overdue."""
        self._repair.deadline_s += by_s

    def refused(self, reason: str) -> list[Action]:
        return self._declare(reason)

    def cleared(self, seq: int) -> None:
        """Note that all of the cache is known from the applied batch `seq` on: earlier losses no longer matter."""
        if seq >= self._partial_from:
            self._become_exact()

    def filled(self, seq: int) -> None:
        """Note that the known blocks fill the replica's pool: there are no others."""
        self.cleared(seq)

    # ---- facts about native replicas

    def status(self, incarnation: int, seq: int, digest: Digest, now_s: float, doubt: Doubt = SURE) -> list[Action]:  # noqa: ARG002
        return []

    def matched(self) -> None:  # noqa: B027
        """The digest of `Compare` was ours."""

    def mismatch(self) -> list[Action]:
        self.stats.digest_mismatches += 1
        return self.refused("the replica's digest differs from ours")

    def progress(self, now_s: float) -> None:  # noqa: B027
        """Handle a part of a snapshot."""

    def snapshot(
        self, incarnation: int, seq: int, payloads: Iterable[bytes], now_s: float, doubt: Doubt = SURE
    ) -> list[Action]:
        self._heard(now_s)
        return self.table[self._state].snapshot(self, incarnation, seq, payloads, now_s, doubt)

    def snapshot_oversized(self) -> list[Action]:
        return []

    # ---- live batches

    def _follow(self, seq: int, payload: bytes, now_s: float) -> list[Action]:
        if self.next_seq is None:
            return self._join(seq) + self._apply(seq, payload)
        if seq < self.next_seq:
            return self._old(seq, payload, now_s)
        if seq == self.next_seq:
            actions = self._apply(seq, payload)
            return actions + self._drain(now_s) if self._held or self._held.dropped_to > seq else actions
        self._hold(seq, payload)
        return self._gap(seq - 1, now_s)

    def _wait(self, seq: int, payload: bytes, now_s: float) -> list[Action]:
        """Hold a live batch until the repair is over."""
        if self.next_seq is not None and (seq < self.next_seq or seq in self._held):
            return self._old(seq, payload, now_s)
        self._hold(seq, payload)
        return []

    def _old(self, seq: int, payload: bytes, now_s: float) -> list[Action]:
        """A number that was given before: to the same batch, or by another incarnation."""
        if self._seen(seq, payload):
            self.stats.duplicates += 1
            return []
        if seq in self._held or seq in self._recent or not self.repairing:
            return self._restart(f"sequence went back from {self.last_seq} to {seq}", seq, payload, now_s)
        return []

    def _hold(self, seq: int, payload: bytes) -> None:
        if seq not in self._held and not self._held.hold(seq, payload):
            self.stats.dropped_waiting += 1  # a gap later, when there is room again

    def _seen(self, seq: int, payload: bytes) -> bool:
        held = self._held.get(seq)
        if held is not None:
            return held == payload
        return self._recent.matches(seq, payload)

    def _heard(self, now_s: float) -> None:
        self._heard_s = now_s
        self._silent = self._silent and self.native  # a native replica is heard by its status

    # ---- replays

    def _ask_replay(
        self, state: State, now_s: float, *, missing_to: int = -1, start: int | None = None
    ) -> list[Action]:
        self.stats.replays += 1
        self.stats.repairs += state in {State.GAP, State.PROOF} and start is None
        self._state = state
        self._repair = Repair(
            now_s + self.config.repair_timeout_s,
            start=max(0, self.last_seq) if start is None else start,
            overlaps=self.last_seq in self._recent,
            missing_to=missing_to,
        )
        return [Replay(self._repair.start)]

    def _replies(self, now_s: float) -> None:
        self._heard(now_s)
        self._replays = True
        self._repair.replies += 1
        self._repair.deadline_s = now_s + self.config.repair_timeout_s

    def _overlap(self, seq: int, payload: bytes, now_s: float) -> list[Action]:
        """A batch replayed that is applied already shows whether the publisher is the same."""
        self._replies(now_s)
        if seq in self._recent and not self._seen(seq, payload):
            return self._restart(f"batch {seq} changed its content", None, b"", now_s)
        return []

    def _filled(self, now_s: float) -> list[Action]:
        self._heard(now_s)
        repair = self._repair
        self._tail_doubted = self._tail_doubted and not repair.proves_tail
        actions: list[Action] = []
        if repair.overlaps and repair.replies == 0:
            if self._replays:
                return self._restart(f"batch {self.last_seq} is unknown to the publisher", None, b"", now_s)
            if repair.start > 0:  # does it ever replay anything?
                state = State.PROOF if self._state is State.PROOF else State.GAP
                return self._ask_replay(state, now_s, start=0, missing_to=repair.missing_to)
            actions = self._declare("the replay socket replays nothing")
        self._state = State.FOLLOWING
        return actions + self._go_on(repair, now_s)

    @abstractmethod
    def _go_on(self, replay: Repair, now_s: float) -> list[Action]:
        """Follow the stream again after a replay, or ask for the batches that it lacked."""

    def _void(self, *_: object) -> list[Action]:
        """An answer that nothing awaits any more."""
        return []

    # ---- time

    def _look_after(self, now_s: float) -> list[Action]:
        """Repeat a request that got no answer, or give it up."""
        repair = self._repair
        if now_s < repair.deadline_s:
            return []
        if repair.tries_again(now_s, self.config):
            return self._ask_again(now_s)
        self._heard_s = now_s
        return self._give_up(now_s)

    def _ask_again(self, now_s: float) -> list[Action]:  # noqa: ARG002
        return [Replay(self._repair.start)]

    @abstractmethod
    def _give_up(self, now_s: float) -> list[Action]:
        """Go on without the answer."""

    # ---- losses

    @abstractmethod
    def _restart(self, reason: str, seq: int | None, payload: bytes, now_s: float) -> list[Action]:
        """Forget a publisher that has restarted; `seq` and `payload` are the first batch of the new one, if known."""

    def _forget_publisher(self, reason: str) -> list[Action]:
        self.stats.restarts += 1
        self._state = State.FOLLOWING
        self._held.clear()
        actions = self._forget(reason)
        self.partial = "not synchronized since the restart"
        return actions

    def _forget(self, reason: str) -> list[Action]:
        self._recent.clear()
        self.next_seq = None
        return [Reset(reason)]

    def _gap(self, last: int, now_s: float) -> list[Action]:
        """Batches up to `last` are missing."""
        assert self.next_seq is not None
        first = self.next_seq
        self.stats.gaps += 1
        self.stats.missing_batches += last - first + 1
        return [Gap(first, last), *self._repair_gap(last, now_s)]

    @abstractmethod
    def _repair_gap(self, last: int, now_s: float) -> list[Action]:
        """Ask for the missing batches, or continue without them."""

    def _declare(self, reason: str) -> list[Action]:
        self.partial = reason
        self._partial_from = self.next_seq or 0
        return [Partial(reason)]

    def _become_exact(self) -> None:
        self.partial = None

    def _join(self, seq: int) -> list[Action]:
        """Begin with the first batch known of this incarnation."""
        self.next_seq = seq
        return [] if seq == 0 else self._declare(f"joined at batch {seq}: what came before is not known")

    def _lose(self, seq: int) -> list[Action]:
        """Go on with batch `seq`: those before it exist nowhere any more."""
        assert self.next_seq is not None
        first, self.next_seq = self.next_seq, seq
        if seq == first:
            return []
        self.stats.lost_batches += seq - first
        return self._declare(f"batches {first} to {seq - 1} are lost" if seq - first > 1 else f"batch {first} is lost")

    # ---- order

    def _apply(self, seq: int, payload: bytes) -> list[Action]:
        assert seq == self.next_seq, f"batch {seq} applied, {self.next_seq} expected"
        self.next_seq = seq + 1
        if seq == 0:
            self._become_exact()
        self.stats.batches += 1
        self.stats.payload_bytes += len(payload)
        self._recent.add(seq, payload)
        if seq in self._held:
            self._held.release(seq)
        return [Apply(seq, payload)]

    def _drain(self, now_s: float) -> list[Action]:
        """Apply held batches that are next in order; the rest shows a gap."""
        actions: list[Action] = []
        while self.next_seq is not None and (payload := self._held.get(self.next_seq)) is not None:
            actions += self._apply(self.next_seq, payload)
        self._held.release_to(self.last_seq)
        missing_to = self._held.missing_to
        return actions + self._gap(missing_to, now_s) if missing_to > self.last_seq else actions

    def _skip_to_held(self, before: int | None = None) -> list[Action]:
        """Apply all held batches, despite gaps between them."""
        actions: list[Action] = []
        for seq in sorted(seq for seq in self._held if before is None or seq < before):
            actions += self._go_to(seq)
            if seq == self.next_seq:
                actions += self._apply(seq, self._held[seq])
        self._held.release_to(self.last_seq)
        return actions

    def _go_to(self, seq: int) -> list[Action]:
        """Make `seq` the next batch, unless it is an old one."""
        if self.next_seq is None:
            return self._join(seq)
        return self._lose(seq) if seq > self.next_seq else []
