"""One replica's stream of batches put in order, without a socket or a clock: facts in, actions out.

A batch has a sequence number but no incarnation, so the same number may mean two different batches. Three rules follow:

* A batch older than expected is a duplicate only if its bytes were seen under that number; otherwise the publisher
  restarted. (After a snapshot of a native replica, batches that it covers may still come in order for the first time.)
* Every replay starts one batch early, at the last one applied: if that comes back with other bytes, or not at all while
  the publisher has nothing newer, the publisher restarted without our seeing it.
* After a reconnect nothing is applied until such a replay (or, from a native replica, a snapshot) has proved that the
  stream is still the same.

What cannot be repaired is never waited for: the state becomes partial, with the reason, until a snapshot, a restart
whose beginning is known, or AllBlocksCleared makes it exact again.
"""

from collections.abc import Iterable

from msgspec import Struct

from events.actions import Action, Apply, Compare, Gap, Partial, Replay, Reset, Snapshot
from events.payloads import PayloadMemory
from events.pool import Digest

OVERSIZED = "the replica's snapshot is too long to be read"
MOST_OVERSIZED = 2


class StreamConfig(Struct, frozen=True):
    native: bool = False
    can_replay: bool = True
    repair_timeout_s: float = 0.5
    repair_attempts: int = 4
    snapshot_interval_s: float = 0.2  # doubles while snapshots do not help
    snapshot_interval_at_most_s: float = 30.0
    status_timeout_s: float = 2.0
    behind_grace_s: float = 0.05
    probe_after_s: float = 1.0
    probe_at_most_s: float = 10.0
    max_held_batches: int = 20_000
    max_held_bytes: int = 64 * 2**20
    # At least as many as a replay brings (vLLM keeps 10,000): their live copies may still be on their way.
    remembered_batches: int = 16_384


class StreamStats(Struct):
    batches: int = 0
    payload_bytes: int = 0
    gaps: int = 0
    missing_batches: int = 0
    replayed_batches: int = 0
    lost_batches: int = 0
    duplicates: int = 0
    restarts: int = 0
    reconnects: int = 0
    replays: int = 0
    snapshots: int = 0
    digests_compared: int = 0
    digest_mismatches: int = 0
    dropped_waiting: int = 0


class _Repair(Struct):
    """A request under way. A probe looks whether an idle stream has lost its tail; live batches go on meanwhile."""

    snapshot: bool
    probe: bool
    deadline_s: float
    start: int = 0
    overlaps: bool = False  # the replay brings a batch we know
    missing_to: int = -1
    attempts: int = 1
    replies: int = 0


class Stream:
    def __init__(self, config: StreamConfig | None = None) -> None:
        self.config = config or StreamConfig()
        self.stats = StreamStats()
        self.incarnation: int | None = None
        self.next_seq: int | None = None
        self.partial: str | None = "not synchronized yet"
        self._partial_from = 0  # the first batch after the loss
        self._repair: _Repair | None = None
        self._unproven = False  # reconnected, and not yet shown to be the same incarnation
        self._silent = False  # the last probe got no answer, or a native replica's status stays away
        self._replays = False  # the replay socket has replayed something
        self._replayed_all = False  # on this connection a replay from 0 has been answered
        self._held: dict[int, bytes] = {}
        self._held_bytes = 0
        self._recent = PayloadMemory(self.config.remembered_batches)
        self._last_live = -1
        self._dropped_to = -1  # the highest batch that had no room to wait
        self._offline = True
        self._status: tuple[int, Digest] | None = None
        self._behind_since_s: float | None = None
        self._snapshot_after_s = 0.0
        self._snapshot_wait_s = self.config.snapshot_interval_s
        self._status_s = 0.0
        self._oversized = 0  # snapshots in a row that were too long to be read
        self._heard_s: float | None = None  # None: not connected yet
        self._probe_s = self.config.probe_after_s

    @property
    def exact(self) -> bool:
        """Whether everything up to `next_seq` is known and no loss is suspected."""
        return self.doubt is None

    @property
    def doubt(self) -> str | None:
        """Why the stream is not exact."""
        if self.partial is not None:
            return OVERSIZED if self._without_snapshots else self.partial
        if self._offline:
            return "not connected"
        if self._repair is not None and not self._repair.probe:
            return "a repair is under way"
        if self._silent:
            return "no status is heard" if self.config.native else "the replay socket does not answer"
        return None if self._behind_since_s is None else "the replica has sent more than has come"

    @property
    def repairing(self) -> bool:
        """Whether an answer is awaited that may change what is known."""
        return self._repair is not None

    @property
    def online(self) -> bool:
        """Whether the event socket has a connection."""
        return not self._offline

    @property
    def settled(self) -> bool:
        """Connected, and no repair is under way: if it is not exact, it will not become so by waiting."""
        return not self._offline and (self._repair is None or self._repair.probe)

    @property
    def lag_batches(self) -> int:
        """Batches that the replica is known to have sent and that are not applied yet."""
        if self.next_seq is None:
            return len(self._held)
        told = -1 if self._status is None else self._status[0]
        missing = -1 if self._repair is None else self._repair.missing_to
        return max(0, max((told, missing, self._dropped_to, *self._held)) - self.last_seq)

    @property
    def last_seq(self) -> int:
        """The last batch applied, or -1."""
        return -1 if self.next_seq is None else self.next_seq - 1

    # ---- facts

    def connected(self, now_s: float) -> list[Action]:
        """The event socket is connected, for the first time or again; from now on `live` gets nothing sent before."""
        self._heard_s = now_s
        self._offline = self._silent = False
        self._last_live = -1
        self._replayed_all = False
        self._snapshot_after_s = now_s
        self._snapshot_wait_s = self.config.snapshot_interval_s
        self._status_s = now_s
        self._oversized = 0
        self._drop_held(None)
        if self.next_seq is None:
            return self._synchronize(now_s)
        self.stats.reconnects += 1
        self._unproven = bool(self._recent)
        if self.config.native:
            return self._ask_snapshot(now_s)
        if self.config.can_replay:
            return self._ask_replay(now_s)
        return self._declare("reconnected; without a replay socket nobody can say what was missed")

    def disconnected(self) -> None:
        """The event socket has lost its connection: what is known may be out of date."""
        self._offline = True

    def live(self, seq: int, payload: bytes, now_s: float) -> list[Action]:
        self._heard(now_s)
        self._probe_s = self.config.probe_after_s
        late, self._last_live = self.config.native and seq > self._last_live, seq
        if self.next_seq is None:
            if self._repair is not None:
                return self._hold(seq, payload)
            return self._join(seq) + self._apply(seq, payload)
        if seq < self.next_seq or seq in self._held:
            if self._seen(seq, payload) or late:
                self.stats.duplicates += 1
                return []
            if seq in self._held or seq in self._recent or self._repair is None:
                return self._restart(f"sequence went back from {self.last_seq} to {seq}", seq, payload, now_s)
            return []
        if self._repair is not None and not self._repair.probe:
            return self._hold(seq, payload)
        if seq == self.next_seq:
            return self._apply(seq, payload) + self._drain(now_s)
        self._hold(seq, payload)
        return self._gap(seq - 1, now_s)

    def replayed(self, seq: int, payload: bytes, now_s: float) -> list[Action]:
        repair = self._repair
        if repair is None or repair.snapshot:
            return []
        self._heard(now_s)
        repair.replies += 1
        self._replays = True
        repair.deadline_s = now_s + self.config.repair_timeout_s
        actions: list[Action] = []
        if self.next_seq is not None and seq < self.next_seq:
            if seq in self._recent and not self._seen(seq, payload):
                return self._restart(f"batch {seq} changed its content", None, b"", now_s)
            self._unproven = self._unproven and seq not in self._recent
            return []
        if self.config.native and (self._unproven or seq != self.next_seq):
            return self._ask_snapshot(now_s)
        if self._unproven:
            actions += self._forget("after a reconnect the last batch known is no longer replayed")
            self._unproven = False
            self.next_seq = None
        actions += self._skip_to_held(before=seq)  # what came live is not lost
        if self.next_seq is None:
            actions += self._join(seq)
        elif seq > self.next_seq:
            actions += self._lose(seq)
        self.stats.replayed_batches += 1
        return actions + self._apply(seq, payload)

    def replay_ended(self, now_s: float) -> list[Action]:
        repair = self._repair
        if repair is None or repair.snapshot:
            return []
        self._heard(now_s)
        self._replayed_all = self._replayed_all or repair.start == 0
        if self.next_seq is None:
            self.next_seq = 0
            self.partial = "nothing published yet, as far as the replay socket tells"
        actions: list[Action] = []
        if repair.replies == 0 and repair.overlaps:
            if self._replays:
                return self._restart(f"batch {self.last_seq} is unknown to the publisher", None, b"", now_s)
            if repair.start > 0:  # does it ever replay anything?
                return self._ask_replay(now_s, start=0, missing_to=repair.missing_to)
            actions += self._declare("the replay socket replays nothing")
        self._repair = None
        self._unproven = False
        if self.last_seq < repair.missing_to:  # asked after the gap was seen, so it exists nowhere any more
            if self.config.native:
                self._drop_held(None)
                return actions + self._ask_snapshot(now_s)
            actions += self._lose(min(self._held, default=repair.missing_to + 1))
        if repair.replies and self.partial is not None and not self._replayed_all and repair.start > 0:
            # It did not answer when we joined; what it still has may make us exact.
            self.next_seq = None
            return actions + self._forget("the replay socket answers now") + self._ask_replay(now_s)
        return actions + self._drain(now_s)

    def progress(self, now_s: float) -> None:
        """Part of a snapshot has come."""
        if self._repair is not None:
            self._repair.deadline_s = now_s + self.config.repair_timeout_s

    def delayed(self, by_s: float) -> None:
        """Nobody has listened for so long: nothing of what was awaited meanwhile is overdue."""
        if self._repair is not None:
            self._repair.deadline_s += by_s
        if self._behind_since_s is not None:
            self._behind_since_s += by_s
        self._status_s += by_s

    def snapshot(self, incarnation: int, seq: int, payloads: Iterable[bytes], now_s: float) -> list[Action]:
        """A native replica's whole cache, true at `seq`."""
        self._heard(now_s)
        if self._repair is None or not self._repair.snapshot:
            return []
        self.incarnation = incarnation
        self._oversized = 0
        self.stats.snapshots += 1
        self._recent.clear()
        self._status = None
        self._repair = None
        self._unproven = False
        self.next_seq = seq + 1
        self._become_exact()
        self._drop_held(seq)
        actions: list[Action] = [Reset("snapshot"), *(Apply(-1, payload) for payload in payloads)]
        return actions + self._drain(now_s)

    def snapshot_oversized(self) -> list[Action]:
        """The answer is too long to be read. The second time it is done without: the third would be as long."""
        if self._repair is None or not self._repair.snapshot:
            return []
        self._oversized += 1
        if not self._without_snapshots:
            return []
        self._repair = None
        return self._declare(OVERSIZED) + self._skip_to_held()

    @property
    def _without_snapshots(self) -> bool:
        return self._oversized >= MOST_OVERSIZED

    def status(self, incarnation: int, seq: int, digest: Digest, now_s: float) -> list[Action]:
        """What a native replica says of itself: the last sequence number it sent and the digest true at it."""
        self._silent = False
        self._status_s = now_s
        if self.incarnation is not None and incarnation != self.incarnation:
            self.incarnation = incarnation
            self._oversized = 0
            return self._restart("the replica has a new incarnation", None, b"", now_s)
        self.incarnation = incarnation
        if self._without_snapshots or self.next_seq is None or self._repair is not None:
            return []
        self._status = (seq, digest)
        if seq >= self.next_seq:
            if self._behind_since_s is None:
                self._behind_since_s = now_s
            return []
        return self._compare()

    def matched(self) -> None:
        """The digest of `Compare` was ours."""
        self._snapshot_wait_s = self.config.snapshot_interval_s

    def mismatch(self) -> list[Action]:
        """The digest of `Compare` was not ours."""
        self.stats.digest_mismatches += 1
        self._back_off()
        return self._declare("the replica's digest differs from ours")

    def refused(self, reason: str) -> list[Action]:
        """A batch that was to be applied could not be read."""
        self._back_off()
        return self._declare(reason)

    def cleared(self, seq: int) -> None:
        """Batch `seq`, which was applied, clears the cache: what was lost before it does not matter any more."""
        if seq >= self._partial_from:
            self.partial = None
            self._oversized = 0

    def resync(self, reason: str, now_s: float) -> list[Action]:
        """What is known is doubted by somebody who compared it with the replica: all of it is asked for again.

        Without a snapshot or a replay to ask for, it is forgotten and learned anew from what still comes.
        """
        if self.config.native:
            actions = self._declare(reason)
            self._oversized = 0
            asked = self._repair is not None and self._repair.snapshot
            return actions if self._offline or asked else actions + self._ask_snapshot(now_s)
        self._repair = None
        self._unproven = False
        self._drop_held(None)
        actions = self._forget(reason)
        self.next_seq = None
        self._declare(reason)
        return actions if self._offline else actions + self._synchronize(now_s)

    def tick(self, now_s: float) -> list[Action]:
        """Time passes."""
        if self._repair is not None:
            return self._retry(now_s) if now_s >= self._repair.deadline_s else []
        if self._heard_s is None:
            return []
        if self.config.native and now_s - self._status_s >= self.config.status_timeout_s:
            self._silent = True
        if self._without_snapshots:
            return []
        if self.config.native and self.partial is not None and now_s >= self._snapshot_after_s:
            return self._ask_snapshot(now_s)
        if self._behind_since_s is not None and now_s - self._behind_since_s >= self.config.behind_grace_s:
            assert self._status is not None
            self._behind_since_s = None
            return self._gap(self._status[0], now_s)
        if self.config.native or not self.config.can_replay:
            return []
        if now_s - self._heard_s >= self._probe_s:
            self._probe_s = min(2 * self._probe_s, self.config.probe_at_most_s)
            return self._ask_replay(now_s, probe=self.next_seq is not None)
        return []

    # ---- repairs

    def _synchronize(self, now_s: float) -> list[Action]:
        if self.config.native:
            return self._ask_snapshot(now_s)
        return self._ask_replay(now_s) if self.config.can_replay else []

    def _ask_replay(
        self, now_s: float, *, probe: bool = False, missing_to: int = -1, start: int | None = None
    ) -> list[Action]:
        self.stats.replays += 1
        self._repair = _Repair(
            snapshot=False,
            probe=probe,
            deadline_s=now_s + self.config.repair_timeout_s,
            start=max(0, self.last_seq) if start is None else start,
            overlaps=self.last_seq in self._recent,
            missing_to=missing_to,
        )
        return [Replay(self._repair.start)]

    def _ask_snapshot(self, now_s: float) -> list[Action]:
        self._behind_since_s = None
        self._drop_held(None)  # the snapshot will cover them, or they are of an earlier incarnation
        if now_s < self._snapshot_after_s:  # the last one did not help: no storm of them
            self._back_off()
            self._repair = _Repair(snapshot=True, probe=False, deadline_s=self._snapshot_after_s, attempts=0)
            return []
        if now_s >= self._snapshot_after_s + self._snapshot_wait_s:
            self._snapshot_wait_s = self.config.snapshot_interval_s
        self._snapshot_after_s = now_s + self._snapshot_wait_s
        self._repair = _Repair(snapshot=True, probe=False, deadline_s=now_s + self.config.repair_timeout_s)
        return [Snapshot()]

    def _back_off(self) -> None:
        self._snapshot_wait_s = min(2 * self._snapshot_wait_s, self.config.snapshot_interval_at_most_s)

    def _retry(self, now_s: float) -> list[Action]:
        repair = self._repair
        assert repair is not None
        if repair.attempts < self.config.repair_attempts:
            repair.attempts += 1
            repair.replies = 0
            repair.deadline_s = now_s + self.config.repair_timeout_s * 2 ** (repair.attempts - 1)
            self._snapshot_after_s = now_s + self._snapshot_wait_s
            return [Snapshot() if repair.snapshot else Replay(repair.start)]
        self._repair = None
        self._heard_s = now_s
        if repair.probe:
            self._silent = True
            return []
        if repair.snapshot:
            # Go on with what is known; while it is partial, `tick` goes on asking.
            self._snapshot_after_s = now_s + self.config.repair_timeout_s * 2**repair.attempts
            return self._declare("the replica does not answer a snapshot request") + self._skip_to_held()
        if self.config.native:
            return self._ask_snapshot(now_s)
        self._unproven = False
        return self._declare("the replay socket does not answer") + self._skip_to_held()

    def _gap(self, last: int, now_s: float) -> list[Action]:
        assert self.next_seq is not None
        first = self.next_seq
        self.stats.gaps += 1
        self.stats.missing_batches += last - first + 1
        found: list[Action] = [Gap(first, last)]
        if self._without_snapshots:
            return found + self._skip_to_held()
        if self.config.can_replay:
            return found + self._ask_replay(now_s, missing_to=last)
        if self.config.native:
            return found + self._ask_snapshot(now_s)
        return found + self._skip_to_held()

    def _restart(self, reason: str, seq: int | None, payload: bytes, now_s: float) -> list[Action]:
        self.stats.restarts += 1
        self._repair = None
        self._unproven = False
        self._drop_held(None)
        actions = self._forget(reason)
        self.next_seq = None
        self.partial = "not synchronized since the restart"
        if not self.config.native and not self.config.can_replay:
            return actions + (self._join(seq) + self._apply(seq, payload) if seq is not None else [])
        if seq is not None:
            self._hold(seq, payload)
        return actions + self._synchronize(now_s)

    def _forget(self, reason: str) -> list[Action]:
        self._recent.clear()
        return [Reset(reason)]

    def _declare(self, reason: str) -> list[Action]:
        self.partial = reason
        self._partial_from = self.next_seq or 0
        return [Partial(reason)]

    def _become_exact(self) -> None:
        self.partial = None
        self._behind_since_s = None

    def _join(self, seq: int) -> list[Action]:
        """The first batch known of this incarnation."""
        self.next_seq = seq
        return [] if seq == 0 else self._declare(f"joined at batch {seq}: what came before is not known")

    def _lose(self, seq: int) -> list[Action]:
        """Batches before `seq` exist nowhere any more: go on without them."""
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
        if self._held.pop(seq, None) is not None:
            self._held_bytes -= len(payload)
        actions: list[Action] = [Apply(seq, payload)]
        return actions if self._status is None else actions + self._compare()

    def _drain(self, now_s: float) -> list[Action]:
        """Applies what was held and is next; what is left then shows a gap."""
        actions: list[Action] = []
        while self.next_seq is not None and (payload := self._held.get(self.next_seq)) is not None:
            actions += self._apply(self.next_seq, payload)
        self._drop_held(self.last_seq)
        missing_to = min(self._held) - 1 if self._held else self._dropped_to
        return actions + self._gap(missing_to, now_s) if missing_to > self.last_seq else actions

    def _skip_to_held(self, before: int | None = None) -> list[Action]:
        """Applies what is held, whatever is missing between."""
        actions: list[Action] = []
        for seq in sorted(seq for seq in self._held if before is None or seq < before):
            if self.next_seq is None:
                actions += self._join(seq)
            elif seq > self.next_seq:
                actions += self._lose(seq)
            if seq == self.next_seq:
                actions += self._apply(seq, self._held[seq])
        self._drop_held(self.last_seq)
        return actions

    def _hold(self, seq: int, payload: bytes) -> list[Action]:
        if len(self._held) >= self.config.max_held_batches or self._held_bytes >= self.config.max_held_bytes:
            self.stats.dropped_waiting += 1  # a gap later, when there is room again
            self._dropped_to = max(self._dropped_to, seq)
        elif seq not in self._held:
            self._held[seq] = payload
            self._held_bytes += len(payload)
        return []

    def _drop_held(self, up_to: int | None) -> None:
        if up_to is None:
            self._dropped_to = -1
        for seq in [seq for seq in self._held if up_to is None or seq <= up_to]:
            self._held_bytes -= len(self._held.pop(seq))

    def _seen(self, seq: int, payload: bytes) -> bool:
        held = self._held.get(seq)
        if held is not None:
            return held == payload
        return self._recent.matches(seq, payload)

    def _heard(self, now_s: float) -> None:
        self._heard_s = now_s
        self._silent = self._silent and self.config.native  # a native replica is heard by its status

    def _compare(self) -> list[Action]:
        assert self._status is not None
        seq, digest = self._status
        if seq > self.last_seq:
            return []
        self._behind_since_s = None
        self._status = None
        if seq < self.last_seq or self.partial is not None:
            return []
        self.stats.digests_compared += 1
        return [Compare(digest)]
